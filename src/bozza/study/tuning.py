"""What each drafter is worth on a user's own prompts: predicted from traces and measured costs, at several batch sizes.

Traces are recorded once; every length, set and batch size is then replayed in simulated time, so that a table of dozens
of configurations takes seconds. The numbers are predictions: they know nothing of requests that come and go.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bozza.drafters.spec import DEFAULT_DRAFT, drafter_names, parse_spec
from bozza.leader import Fixed
from bozza.leader.cost import CostModel
from bozza.params import SamplingParams
from bozza.study import profiles
from bozza.study.costs import measure
from bozza.study.guesses import FREE, Guesser, parse_guessers
from bozza.study.oracle import Oracle, Run
from bozza.study.recorder import record
from bozza.study.replay import Simulation, leader_of, speedups
from bozza.study.traces import Trace, load_traces

if TYPE_CHECKING:
    from bozza.bench import Case
    from bozza.llm import LLM

SECONDS = 12.0  # of calibration
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
UNRECORDED = ("grammar", "prediction")  # drafters that plain prompts give nothing to do


def drafters_to_tune() -> list[str]:
    """What is tuned when nothing is said: the default drafters, as far as prompts alone give them something to do."""
    return [text for text in DEFAULT_DRAFT if parse_spec(text).kind not in UNRECORDED]


def batch_sizes(most: int) -> list[int]:
    """1, 4, 16, ... and the most."""
    sizes = [1]
    while 4 * sizes[-1] < most:
        sizes.append(4 * sizes[-1])
    return sizes if most == 1 else [*sizes, most]


def tune(
    llm: LLM,
    cases: Sequence[Case],
    *,
    tokens: int,
    batches: Sequence[int],
    seconds: float = SECONDS,
    on_part: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """Measure costs, record traces and predict; the costs become the profile of this setting.

    Args:
        llm: with the drafters in question.
        cases: the prompts.
        tokens: the most tokens of each output, decoded greedily.
        batches: sizes to predict for.
        seconds: about how long the calibration takes.
        on_part: told what is done next.

    Returns:
        {"predicted": True, "profile": file or None, "costs": document, "requests", "tokens"} and what `predict` says.

    Raises:
        ConfigError: there is a drafter of which nothing can be recorded.
    """
    on_part("measuring this machine")
    costs = measure(llm, cases[0].prompt, seconds)
    file = profiles.save(profiles.setting_of(llm), costs, profiles.costs_folder())
    on_part(f"recording {len(cases)} outputs")
    traces = record_traces(llm, cases, tokens)
    on_part("replaying")
    return {
        "predicted": True,
        "profile": str(file) if file else None,
        "costs": costs,
        "requests": len(traces),
        "tokens": sum(len(trace.output) for trace in traces),
        **predict(traces, llm.draft, costs, batches),
    }


def record_traces(llm: LLM, cases: Sequence[Case], tokens: int) -> list[Trace]:
    """What the model writes, and what each drafter would have said at each place."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.jsonl"
        record(llm, cases, SamplingParams(max_tokens=tokens), file)
        return load_traces(file)


def predict(
    traces: Sequence[Trace], draft: Sequence[str], costs: Mapping[str, Any], batches: Sequence[int]
) -> dict[str, Any]:
    """What is to be expected of each drafter, of all together, and of the best leader there could be.

    Args:
        traces: with a record of each drafter.
        draft: specifications of the drafters.
        costs: as `CostModel.from_document` reads them.
        batches: sizes; copies of one request run in lock step.

    Returns:
        {"batches": [...], "drafters": [{"name", "free", "lengths": {batch: {k: speedup}}, "best": {batch: k, 0 when
        plain decoding is faster}, "speedup": {batch: ...}, "tokens_per_step", "first_token", "draft_ms",
        "token_ms"}], "sets": {"merged", "adaptive", "oracle": {batch: speedup}}}. Speedups are total time of plain
        decoding over total time. What is said of a single drafter is at batch 1 and its best length there.
    """
    guessers = parse_guessers(_replayed(draft), traces)
    models = {batch: CostModel.from_document(costs, copies=batch) for batch in batches}
    drafters = [_drafter(traces, guesser, models) for guesser in guessers]
    sets: dict[str, dict[int, float]] = {"merged": {}, "adaptive": {}, "oracle": {}}
    for batch, model in models.items():
        best = {entry["name"]: entry["best"][batch] or 1 for entry in drafters}
        leaders = {
            "merged": Fixed(best),
            "adaptive": leader_of("adaptive", guessers, CostModel.from_document(costs, copies=batch)),
        }
        for name, leader in leaders.items():
            sets[name][batch] = _speedup(Simulation(traces, guessers, model, leader).run())
        oracle = Oracle(traces, guessers, model)
        sets["oracle"][batch] = _speedup([oracle.run(index) for index in range(len(traces))])
    return {"batches": list(batches), "drafters": drafters, "sets": sets}


def _replayed(draft: Sequence[str]) -> list[str]:
    """The drafters as a replay names them: free ones run again, others do as recorded."""
    specs = [parse_spec(text) for text in draft]
    return [
        spec.text if spec.kind in FREE else f"recorded:{name}"
        for name, spec in zip(drafter_names(specs), specs, strict=True)
    ]


def _drafter(traces: Sequence[Trace], guesser: Guesser, models: Mapping[int, CostModel]) -> dict[str, Any]:
    lengths: dict[int, dict[int, float]] = {}
    per_step: dict[int, float] = {}
    for batch, model in models.items():
        lengths[batch] = {}
        for k in _lengths(guesser.tokens):
            runs = Simulation(traces, [guesser], model, Fixed({guesser.name: k})).run()
            lengths[batch][k] = _speedup(runs)
            per_step[k] = sum(run.tokens for run in runs) / sum(run.steps for run in runs)
    fastest = {batch: max(found, key=lambda k: found[k]) for batch, found in lengths.items()}
    first = min(models)
    return {
        "name": guesser.name,
        "free": guesser.spec is not None,
        "lengths": lengths,
        "best": {batch: k if lengths[batch][k] > 1.0 else 0 for batch, k in fastest.items()},
        "speedup": {batch: lengths[batch][k] for batch, k in fastest.items()},
        **_reasons(traces, guesser, models[first], fastest[first]),
        "tokens_per_step": per_step[fastest[first]],
    }


def _reasons(traces: Sequence[Trace], guesser: Guesser, model: CostModel, k: int) -> dict[str, Any]:
    """What a drafter's worth comes from, at a length of k tokens."""
    cached = round(statistics.mean(len(trace.prompt) + len(trace.output) // 2 for trace in traces))
    right = list(_first_right(traces, guesser, model))
    extra = model.pass_seconds(1, 1 + k, cached) - model.pass_seconds(1, 1, cached)
    return {
        "length": k,
        "first_token": sum(right) / len(right) if right else 0.0,
        "draft_ms": 1e3 * model.draft_seconds(guesser.name, 1, k, k, cached),
        "token_ms": 1e3 * extra / k,
    }


def _first_right(traces: Sequence[Trace], guesser: Guesser, model: CostModel) -> Iterator[bool]:
    """Whether the first token of a drafter was right, at each place where there was use for one."""
    oracle = Oracle(traces, [guesser], model)
    for index, trace in enumerate(traces):
        right = oracle.right(index)[guesser.name]
        yield from (right[place] > 0 for place in range(1, len(trace.output) - 1))


def _lengths(most: int) -> list[int]:
    return [*(length for length in LENGTHS if length < most), most]


def _speedup(runs: Sequence[Run]) -> float:
    return speedups(runs)["speedup_total"]
