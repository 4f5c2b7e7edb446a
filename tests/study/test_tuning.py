"""What `bozza tune` predicts, against sums done by hand and against the replay itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bozza import LLM
from bozza.bench import Case
from bozza.errors import ConfigError
from bozza.leader.cost import CostModel
from bozza.params import SamplingParams
from bozza.study import costs, profiles, tuning
from bozza.study.replay import replay
from bozza.study.traces import Trace
from bozza.study.tuning import batch_sizes, drafters_to_tune, predict, tune
from invented import COSTS, invented

# A pass takes 10 and 1 for each further token, a draft of the good drafter 1 and of the bad one 20.
PLAIN = {
    "verify": {"knots": [[1, 10.0], [101, 110.0]], "per_row": 0.0, "per_cached": 0.0},
    "drafters": {"eagle": {"base": 1.0, "per_depth": 0.5}, "model": {"base": 20.0}},
}


def steady(length: int = 21, cap: int = 8, **right: int) -> Trace:
    """A trace in which each drafter has always the same number of tokens right."""
    output = tuple(range(100, 100 + length))
    accept = {name: (count,) * length for name, count in right.items()}
    return Trace((1, 2, 3), output, accept, dict.fromkeys(right, cap))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 4]), (5, [1, 4, 5]), (16, [1, 4, 16]), (32, [1, 4, 16, 32])]
)
def test_batch_sizes(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_predictions_are_what_a_sum_by_hand_says() -> None:
    found = predict([steady(eagle=2, model=0)], ["eagle:k=8", "model:x,k=8"], PLAIN, [1])
    good, bad = found["drafters"]
    assert (good["name"], bad["name"]) == ("eagle", "model")
    assert list(good["lengths"][1]) == [1, 2, 4, 8]
    # 21 tokens are 7 steps of 3, in each of which 2 drafted tokens stand; the last one has no room for more.
    assert good["lengths"][1][2] == pytest.approx(21 * 10.0 / (7 * (10.0 + 2.0) + 7 * (1.0 + 2 * 0.5)))
    assert good["best"] == {1: 2}
    assert good["speedup"][1] == good["lengths"][1][2]
    assert good["tokens_per_step"] == pytest.approx(3.0)
    assert good["first_token"] == 1.0
    assert good["draft_ms"] == pytest.approx(2000.0)
    assert good["token_ms"] == pytest.approx(1000.0)
    assert bad["best"] == {1: 0}
    assert bad["speedup"][1] < 1.0
    assert bad["first_token"] == 0.0
    assert not good["free"]
    assert found["sets"]["oracle"][1] == pytest.approx(good["speedup"][1])
    # Together the bad one is asked for a token too: 20 for the call, 1 for the token, for which the seventh step has no
    # room, so that one of the good ones is left out and a plain step must follow.
    assert found["sets"]["merged"][1] == pytest.approx(21 * 10.0 / (6 * (13.0 + 22.0) + (12.0 + 22.0) + 10.0))


def test_a_drafter_may_be_asked_for_any_number_up_to_its_own() -> None:
    (entry,) = predict([steady(cap=6, eagle=1)], ["eagle:k=6"], PLAIN, [1])["drafters"]
    assert list(entry["lengths"][1]) == [1, 2, 4, 6]
    assert (entry["best"][1], entry["first_token"]) == (1, 1.0)


def test_more_copies_make_long_drafts_dearer() -> None:
    found = predict([steady(eagle=4)], ["eagle:k=8"], PLAIN, [1, 16])
    (entry,) = found["drafters"]
    assert entry["best"][1] == 4
    assert entry["speedup"][16] < entry["speedup"][1]
    assert found["sets"]["oracle"][16] >= entry["speedup"][16]


@pytest.mark.parametrize("batch", [1, 4])
def test_each_number_is_the_one_that_replay_gives(batch: int) -> None:
    traces = [invented(seed, length=30) for seed in range(4)]
    draft = ["eagle:k=3", "mtp:k=3", "ngram:k=4"]
    found = predict(traces, draft, COSTS, [batch])
    named = ["recorded:eagle", "recorded:mtp", "ngram:k=4"]
    for entry, text in zip(found["drafters"], named, strict=True):
        for k, speedup in entry["lengths"][batch].items():
            alone = replay(traces, COSTS, f"fixed:{k}", batch=batch, draft=[text])
            assert speedup == pytest.approx(alone["speedup_total"])
            if batch == 1 and k == entry["length"]:
                assert entry["tokens_per_step"] == pytest.approx(alone["tokens"] / alone["steps"])
    best = {entry["name"]: entry["best"][batch] or 1 for entry in found["drafters"]}
    together = "fixed:" + ",".join(f"{name}={k}" for name, k in best.items())
    for name, policy in (("merged", together), ("adaptive", "adaptive"), ("oracle", "oracle")):
        whole = replay(traces, COSTS, policy, batch=batch, draft=named)
        assert found["sets"][name][batch] == pytest.approx(whole["speedup_total"])


def test_free_drafters_run_again_and_cost_nothing() -> None:
    trace = Trace((1, 2, 3, 4, 5, 6, 1, 2), (3, 4, 5, 6, 1, 2, 3, 4), {"ngram": (0,) * 8}, {"ngram": 8})
    (entry,) = predict([trace], ["ngram"], PLAIN, [1])["drafters"]
    assert entry["free"]
    assert entry["draft_ms"] == 0.0
    assert entry["speedup"][1] > 1.5


def test_default_drafters_are_those_that_can_be_recorded() -> None:
    assert "ngram" in drafters_to_tune()
    assert not {"grammar", "prediction"} & set(drafters_to_tune())


def test_tune_measures_keeps_records_and_predicts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "costs_folder", lambda: tmp_path / "costs")
    llm = LLM(folders["target"], draft=["ngram", f"model:{folders['shallow']},k=3"], policy="fixed", max_batch=2)
    cases = [Case("a", [5, 6, 7, 8]), Case("a", [9, 10, 11])]
    parts: list[str] = []
    found = tune(llm, cases, tokens=20, batches=[1, 2], seconds=0.3, on_part=parts.append)
    assert len(parts) == 3
    setting = profiles.setting_of(llm)
    assert found["profile"] == str(profiles.path_of(setting, tmp_path / "costs"))
    assert profiles.load(setting, tmp_path / "costs").costs == found["costs"]
    assert found["costs"]["verify"]["per_row"] >= 0.0
    assert set(found["costs"]["drafters"]) == {"model"}
    assert found["requests"] == 2
    plain = llm.with_policy("off").generate([case.prompt for case in cases], SamplingParams(max_tokens=20))
    assert found["tokens"] == sum(len(output.token_ids) for output in plain)
    assert [entry["name"] for entry in found["drafters"]] == ["ngram", "model"]
    assert all(value > 0.0 for numbers in found["sets"].values() for value in numbers.values())
    assert found["predicted"] is True


def test_costs_are_of_sixteen_requests_whatever_the_llm_runs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def calibrate(engine_with: Any, paid: Any, **options: Any) -> dict[str, Any]:
        seen.update(options, paid=paid, running=engine_with(None).scheduler._max_running)
        return {}

    monkeypatch.setattr(costs, "calibrate", calibrate)
    draft = [f"model:{folders['shallow']},k=3", "suffix", f"eagle:{folders['head']},k=5"]
    llm = LLM(folders["target"], draft=draft, policy="fixed", max_batch=1)
    costs.measure(llm, [5, 6], 3.0)
    assert seen["paid"] == {"model": 3, "eagle": 5}
    assert seen["running"] == 16
    assert (seen["text"], seen["seconds"]) == ([5, 6], 3.0)


def test_a_cache_that_cannot_be_written_is_no_error(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(profiles, "costs_folder", lambda: tmp_path / "file" / "costs")
    llm = LLM(folders["target"], draft=["ngram"], policy="fixed")
    with pytest.warns(UserWarning, match="cannot be written"):
        found = tune(llm, [Case("a", [5, 6, 7])], tokens=6, batches=[1], seconds=0.1)
    assert found["profile"] is None
    CostModel.from_document(found["costs"])


def test_what_cannot_be_recorded_is_refused(folders: dict[str, Path]) -> None:
    llm = LLM(folders["target"], draft=["grammar"], policy="fixed")
    with pytest.raises(ConfigError, match="drafter grammar has nothing to say"):
        tuning.record_traces(llm, [Case("a", [5])], 4)
