"""Plain and speculative decoding of the same prompts, taking turns in one process, on the same number of tokens."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from bozza.core import STAGES, Stage, StepStats
from bozza.drafters.spec import drafter_names, parse_spec
from bozza.errors import ConfigError, PromptError
from bozza.llm import LLM, Output
from bozza.params import SamplingParams, Structured
from bozza.theory import best_gamma, walltime_factor


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a workload, as token ids."""

    workload: str
    prompt: list[int]


@dataclass(slots=True)
class Tally:
    """What one policy did on one workload."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0  # summed over requests, so that plain decoding commits 1 per pass at any batch
    drafted: Counter[str] = field(default_factory=Counter)
    tested: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    draft_seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    speeds: list[float] = field(default_factory=list)  # tokens per second of each run
    differences: list[dict[str, Any]] = field(default_factory=list)
    # Seconds of single steps that read no prompt, for `against_theory`: in the target by requests, when nothing was
    # drafted, and in a drafter by its name, requests, and tokens that it drafted for all of them together.
    plain_steps: dict[int, list[float]] = field(default_factory=dict)
    draft_steps: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    reading: bool = False  # the last step read a prompt

    def add_run(self, outputs: Sequence[Output], seconds: float) -> None:
        """Count a finished run."""
        tokens = sum(len(output.token_ids) for output in outputs)
        self.tokens += tokens
        self.seconds += seconds
        self.speeds.append(tokens / seconds)
        self.passes += sum(output.stats.passes for output in outputs)

    def add_step(self, step: StepStats) -> None:
        """Count one step of a run."""
        self.drafted.update(step.drafted)
        self.tested.update(step.tested)
        self.accepted.update(step.accepted)
        self._add_seconds(step.seconds, step.draft_seconds)
        # A model drafter reads the prompt in the step after the target did: neither is a step of decoding.
        before, self.reading = self.reading, step.new_tokens - sum(step.drafted.values()) > step.rows
        if before or self.reading:
            return
        if not step.draft_seconds:
            self.plain_steps.setdefault(step.rows, []).append(step.seconds["verify"])
        for name, spent in step.draft_seconds.items():
            self.draft_steps.setdefault((name, step.rows, step.drafted.get(name, 0)), []).append(spent)

    def merge(self, other: Tally) -> None:
        """Add another workload's tally."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.passes += other.passes
        self.drafted += other.drafted
        self.tested += other.tested
        self.accepted += other.accepted
        self.speeds += other.speeds
        self.differences += other.differences
        for rows, seconds in other.plain_steps.items():
            self.plain_steps.setdefault(rows, []).extend(seconds)
        for kind, seconds in other.draft_steps.items():
            self.draft_steps.setdefault(kind, []).extend(seconds)
        self._add_seconds(other.stages, other.draft_seconds)

    def _add_seconds(self, stages: Mapping[Stage, float], draft_seconds: Mapping[str, float]) -> None:
        for stage, spent in stages.items():
            self.stages[stage] += spent
        for name, spent in draft_seconds.items():
            self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + spent


def load_cases(path: Path, llm: LLM, limit: int | None = None) -> list[Case]:
    """Read a prompt file: JSON lines with "workload" and either "prompt" (text) or "messages".

    Args:
        path: the file.
        llm: whose tokenizer and chat template apply.
        limit: the most prompts of each workload.

    Raises:
        PromptError: the file cannot be read, or a line is not such a record; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a text
    except (OSError, UnicodeDecodeError) as problem:
        raise PromptError(f"cannot read {path}: {problem}") from problem
    cases: list[Case] = []
    taken: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        case = _case(line, f"{path}:{number}", llm)
        if limit is None or taken[case.workload] < limit:
            taken[case.workload] += 1
            cases.append(case)
    if not cases:
        raise PromptError(f"{path} holds no prompts")
    return cases


def _case(line: str, place: str, llm: LLM) -> Case:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise PromptError(f"{place} is not JSON: {problem.msg}") from problem
    if not isinstance(record, dict) or not ({"prompt", "messages"} & set(record)):
        raise PromptError(f'{place}: write {{"workload": "...", "prompt": "..."}} or "messages" instead of "prompt"')
    if unknown := set(record) - {"workload", "prompt", "messages"}:
        raise PromptError(f"{place}: unknown key {sorted(unknown)[0]!r}")
    if "prompt" in record and "messages" in record:
        raise PromptError(f"{place}: give either a prompt or messages")
    if not isinstance(record.get("prompt", ""), str) or not isinstance(record.get("messages", []), list):
        raise PromptError(f"{place}: a prompt is a text, messages are a list")
    try:
        ids = llm.encode(record["prompt"]) if "prompt" in record else llm.encode_chat(record["messages"])
        llm.engine.check_prompt(ids)
    except PromptError as problem:
        raise PromptError(f"{place}: {problem}") from problem
    return Case(str(record.get("workload", "default")), ids)


def run_bench(
    llm: LLM,
    cases: Sequence[Case],
    params: SamplingParams,
    *,
    batch: int = 1,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure `llm` against plain decoding with the same loaded model.

    Args:
        llm: as it would be used.
        cases: what to decode.
        params: for every prompt; a fixed number of tokens makes a fair comparison (`ignore_eos`).
        batch: prompts of one workload that run at a time.
        repeat: how often everything is run.
        clock: seconds, monotonic.
        on_run: called after each run, `runs_needed` times.

    Returns:
        The document that `bozza bench` writes: {"environment": ..., "rows": [...]}. Under a rule that keeps only the
        law of sampled outputs nothing is compared, and "identical" is None in the rows that speculate. "theory" is
        what `against_theory` says.

    Raises:
        ConfigError: several outputs of each prompt are asked for.
        PromptError: outputs are sampled without a seed.
    """
    if params.n > 1:
        raise ConfigError(f"n is {params.n}: a benchmark measures one output of each prompt, use n=1")
    contestants = {"off": llm.with_policy("off")} | ({llm.policy: llm} if llm.policy != "off" else {})
    if params.temperature > 0.0 and params.seed is None and llm.rule == "coupled":
        raise PromptError("sampled outputs can only be compared with a seed: add one")
    for contestant in contestants.values():
        contestant.generate([cases[0].prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    in_law = params.temperature > 0.0 and llm.rule != "coupled"
    tallies: dict[str, dict[str, Tally]] = {}
    groups = [group for _ in range(repeat) for group in _groups(cases, batch)]
    for turn, group in enumerate(groups):
        tally = tallies.setdefault(group[0].workload, {name: Tally() for name in contestants})
        outputs = {}
        # Whoever goes first pays for a cold cache: take turns.
        for name in sorted(contestants, reverse=turn % 2 == 1):
            started = clock()
            prompts = [case.prompt for case in group]
            outputs[name] = contestants[name].generate(prompts, params, on_step=tally[name].add_step)
            tally[name].add_run(outputs[name], clock() - started)
            on_run()
        if not in_law:
            for name in contestants:
                tally[name].differences += _compare(llm, params, outputs["off"], outputs[name])
    return {
        "environment": environment(llm) | {"params": params_document(params), "batch": batch, "repeat": repeat},
        "rows": _rows(tallies, in_law, _model_drafter(llm)),
    }


def runs_needed(llm: LLM, cases: Sequence[Case], batch: int, repeat: int) -> int:
    """How often `run_bench` will call `on_run`."""
    return len(_groups(cases, batch)) * repeat * (1 if llm.policy == "off" else 2)


def _groups(cases: Sequence[Case], batch: int) -> list[tuple[Case, ...]]:
    by_workload: dict[str, list[Case]] = {}
    for case in cases:
        by_workload.setdefault(case.workload, []).append(case)
    return [
        tuple(members[first : first + batch])
        for members in by_workload.values()
        for first in range(0, len(members), batch)
    ]


def _compare(
    llm: LLM, params: SamplingParams, plain: Sequence[Output], other: Sequence[Output]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for a, b in zip(plain, other, strict=True):
        difference = llm.first_difference(a, b, params)
        if difference is not None:
            found.append(asdict(difference))
    return found


def _model_drafter(llm: LLM) -> tuple[str, int] | None:
    """Name and tokens per draft of the one model drafter; None without one, with several, or if they vary."""
    specs = [parse_spec(text) for text in llm.draft]
    models = [(name, spec.tokens) for name, spec in zip(drafter_names(specs), specs, strict=True) if spec.model]
    return models[0] if llm.policy == "fixed" and len(models) == 1 else None


def against_theory(tally: Tally, off: Tally, name: str, gamma: int) -> dict[str, Any] | None:
    """What a model drafter should have gained (`bozza.theory`), beside what it did gain.

    - alpha: accepted over tested tokens. Those drafted after the first miss were never compared and do not count.
    - c: seconds in the drafter per step and depth of the draft, over seconds in the target per step of plain decoding.
      All requests of a step share its passes, so with several requests both are of the whole batch: the drafter runs
      `gamma` times for all of them together, however many tokens that makes. Compared are medians of steps with the
      same number of requests (the one with most such steps) that read no prompt, neither in the target nor in the
      drafter, and in which every request got a draft of full length. The drafter's time has the drawing of its tokens
      in it, the target's has not.
    - gamma: tokens per draft, as asked for.
    - expected: the wall-time factor of theorem 3.8 for these. It knows nothing of a verifying pass that takes longer
      than a plain one, of time outside both models, of prompts, or of requests that end before others of their batch.
    - measured: the ratio to plain decoding.
    - best_gamma: the gamma with the largest expected factor.

    Args:
        tally: of the policy that drafted.
        off: of plain decoding of the same prompts, in the same run.
        name: the model drafter's.
        gamma: how many tokens it was asked for at each step.

    Returns:
        The above by name; None when another drafter drafted too or none did, or no such steps were seen.
    """
    plain = off.plain_steps
    full = {
        rows: tally.draft_steps[name, rows, gamma * rows]
        for rows in plain
        if (name, rows, gamma * rows) in tally.draft_steps
    }
    if set(tally.drafted) != {name} or not full:
        return None
    rows = max(full, key=lambda rows: (len(full[rows]), rows))
    cost = statistics.median(full[rows]) / gamma / statistics.median(plain[rows])
    alpha = tally.accepted[name] / tally.tested[name]
    return {
        "alpha": alpha,
        "c": cost,
        "gamma": gamma,
        "expected": walltime_factor(alpha, gamma, cost),
        "measured": _ratio(tally, off),
        "best_gamma": best_gamma(alpha, cost),
    }


def _ratio(tally: Tally, off: Tally) -> float:
    """How many times the tokens per second of plain decoding."""
    return (tally.tokens / tally.seconds) / (off.tokens / off.seconds)


def _rows(
    tallies: Mapping[str, Mapping[str, Tally]], in_law: bool, drafter: tuple[str, int] | None
) -> list[dict[str, Any]]:
    rows = []
    total: dict[str, Tally] = {}
    for workload, by_policy in tallies.items():
        for policy, tally in by_policy.items():
            rows.append(_row(workload, policy, tally, by_policy["off"], in_law, drafter))
            total.setdefault(policy, Tally()).merge(tally)
    if len(tallies) > 1:
        rows += [_row("all", policy, tally, total["off"], in_law, drafter) for policy, tally in total.items()]
    return rows


def _row(
    workload: str, policy: str, tally: Tally, off: Tally, in_law: bool, drafter: tuple[str, int] | None
) -> dict[str, Any]:
    return {
        "workload": workload,
        "policy": policy,
        "tokens": tally.tokens,
        "seconds": tally.seconds,
        "tokens_per_s": tally.tokens / tally.seconds,
        "ratio_to_off": _ratio(tally, off),
        "ratio_median": statistics.median(a / b for a, b in zip(tally.speeds, off.speeds, strict=True)),
        "identical": None if in_law and policy != "off" else not tally.differences,
        "differences": tally.differences,
        "committed_per_pass": tally.tokens / tally.passes,
        "drafters": {
            name: {
                "drafted": drafted,
                "tested": tally.tested[name],
                "accepted": tally.accepted[name],
                "share": tally.accepted[name] / tally.tokens,
                "seconds": tally.draft_seconds.get(name, 0.0),
            }
            for name, drafted in tally.drafted.items()
        },
        "theory": against_theory(tally, off, *drafter) if drafter is not None and policy != "off" else None,
        "seconds_by_stage": tally.stages,
    }


def mixed(cases: Sequence[Case]) -> list[Case]:
    """One prompt of each workload after the other."""
    by_workload: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_workload[case.workload].append(case)
    rounds = max(map(len, by_workload.values()))
    return [mine[turn] for turn in range(rounds) for mine in by_workload.values() if turn < len(mine)]


def environment(llm: LLM) -> dict[str, Any]:
    """What a measurement depends on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bozza": version("bozza"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(llm.runner.device),
        "dtype": str(llm.runner.dtype).removeprefix("torch."),
        "weights": llm.weights,
        "compiled": llm.compiled,
        "model": llm.model_path.name if llm.model_path else None,
        "policy": llm.policy,
        "rule": llm.rule,
        "invariant": llm.invariant,
        "shared_history": llm.shared_history is not None,
        "draft": list(llm.draft),
    }


def params_document(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON. What JSON cannot hold, such as a logits processor, is named."""

    def plain(value: Any) -> Any:
        if isinstance(value, (SamplingParams, Structured)):
            return {entry.name: getattr(value, entry.name) for entry in fields(value)}
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Real):  # of numpy
            return int(value) if isinstance(value, Integral) else float(value)
        return getattr(value, "__qualname__", type(value).__qualname__)

    document: dict[str, Any] = json.loads(json.dumps(params, default=plain))
    return document


def _processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
