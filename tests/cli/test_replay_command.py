"""`bozza trace` and `bozza replay`, as a person calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bozza import LLM
from bozza.study.replay import replay
from bozza.study.traces import load_traces
from invented import COSTS, invented

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(invented(seed, length=30).line() + "\n" for seed in range(3)))
    return file


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    return file


@pytest.mark.parametrize("policy", ["off", "fixed", "fixed:2", "fixed:eagle=2,ngram=3", "adaptive", "oracle"])
def test_replay_prints_the_document(bozza: Command, traces: Path, costs: Path, policy: str) -> None:
    flags = ("--policy", policy, "--batch", 3, "--draft", "ngram:k=3", "--draft", "recorded:eagle", "--json")
    code, out, _ = bozza("replay", traces, "--costs", costs, *flags)
    assert code == 0
    expected = replay(load_traces(traces), COSTS, policy, batch=3, draft=["ngram:k=3", "recorded:eagle"])
    assert json.loads(out) == json.loads(json.dumps(expected))


def test_replay_is_adaptive_with_all_drafters_unless_told_otherwise(bozza: Command, traces: Path, costs: Path) -> None:
    out = bozza("replay", traces, "--costs", costs, "--json")[1]
    assert json.loads(out) == json.loads(json.dumps(replay(load_traces(traces), COSTS, "adaptive")))


def test_replay_says_what_share_of_the_best_was_reached(bozza: Command, traces: Path, costs: Path) -> None:
    code, out, _ = bozza("replay", traces, "--costs", costs)
    document = replay(load_traces(traces), COSTS, "adaptive")
    assert code == 0
    for number in (document["speedup_mean_throughput"], document["oracle"]["speedup_total"]):
        assert f"{number:.3f}" in out
    assert f"{document['share_of_oracle']:.1%}" in out
    for row in document["reliability"]:
        assert re.search(rf"{row['predicted']:.0%} +{row['observed']:.0%} +{row['nodes']:.0f}\b", out)
    plain = bozza("replay", traces, "--costs", costs, "--policy", "off")[1]
    assert "oracle" not in plain
    assert "stood" not in plain


def test_the_cap_may_stand_in_the_costs(bozza: Command, tmp_path: Path) -> None:
    traces, costs = tmp_path / "traces.jsonl", tmp_path / "costs.json"
    traces.write_text('{"prompt": [1], "output": [2, 3, 4, 5], "accept": {"eagle": [0, 1, 0, 0]}}\n')
    seen = []
    for cap in ({}, {"cap": {"eagle": 3}}):
        costs.write_text(json.dumps(COSTS | cap))
        out = bozza("replay", traces, "--costs", costs, "--policy", "fixed", "-d", "recorded:eagle", "--json")[1]
        seen.append(json.loads(out)["by_request"][0]["seconds"])
    assert seen[1] > seen[0]  # three tokens were drafted where one was


def test_a_stored_profile_is_as_good_as_its_costs(bozza: Command, traces: Path, costs: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"format": "bozza-costs", "version": 1, "costs": COSTS}))
    plain, stored = (bozza("replay", traces, "--costs", file, "--json") for file in (costs, profile))
    assert plain == stored
    assert plain[0] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"traces": "/no/such/file"}, "cannot read /no/such/file"),
        ({"costs": "/no/such/file"}, "--costs /no/such/file: cannot be read"),
        ({"costs": "{traces}"}, "--costs {traces}: cannot be read"),
        ({"costs": "[]"}, 'write {{"verify"'),
        ({"costs": "{{}}"}, 'write {{"verify"'),
        ({"costs": '{{"verify": {{"base": 1}}, "cap": 3}}'}, "cap is an object"),
        ({"costs": '{{"verify": {{"base": 1}}, "colour": 3}}'}, "unknown key 'colour'"),
        ({"costs": '{{"verify": {{"base": 1}}}}'}, "the costs say nothing of drafter eagle"),
        ({"policy": "best"}, "no policy 'best'"),
        ({"draft": "eagle"}, "draft 'eagle' cannot run on a trace"),
    ],
)
def test_mistakes_are_one_line(
    bozza: Command, tmp_path: Path, traces: Path, costs: Path, changes: dict[str, str], says: str
) -> None:
    given = {"traces": str(traces), "costs": str(costs), "policy": "fixed", "draft": "recorded:eagle"}
    given |= {key: value.format(traces=traces) for key, value in changes.items()}
    if given["costs"][0] in "[{":
        (tmp_path / "other.json").write_text(given["costs"])
        given["costs"] = str(tmp_path / "other.json")
    code, out, err = bozza(
        "replay", given["traces"], "--costs", given["costs"], "--policy", given["policy"], "--draft", given["draft"]
    )
    assert (code, out) == (2, "")
    assert err.startswith("error:")
    assert says.format(traces=traces) in err
    assert len(err.strip().splitlines()) == 1


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = {"first": "abcabcabc", "second": "one two one two", "third": "xyz"}
    file.write_text("".join(json.dumps({"workload": name, "prompt": text}) + "\n" for name, text in texts.items()))
    return file


def test_what_was_traced_can_be_replayed(
    bozza: Command, folders: dict[str, Path], prompts: Path, costs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recorded.jsonl"
    flags = ("--model", folders["target"], "--draft", "ngram:k=4", "--prompts", prompts, "--tokens", 20, "--out", out)
    assert bozza("trace", *flags, "--ignore-eos", "--limit", 1)[0] == 0
    recorded = load_traces(out)
    assert [trace.workload for trace in recorded] == ["first", "second", "third"]
    assert [len(trace.output) for trace in recorded] == [20] * 3
    assert all(trace.cap == {"ngram": 4} for trace in recorded)
    code, _, err = bozza("trace", *flags, "--ignore-eos")
    assert (code, "0 traces added" in err) == (0, True)
    code, found, _ = bozza("replay", out, "--costs", costs, "--policy", "fixed", "-d", "recorded:ngram", "--json")
    assert (code, json.loads(found)["tokens"]) == (0, 60)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--draft": "grammar"}, "drafter grammar has nothing to say"),
        ({"--draft": "nonsense"}, "no drafter 'nonsense'"),
        ({"--prompts": "/no/such/file"}, "--prompts /no/such/file: there is no such file"),
        ({"--out": "/no/such/folder/file"}, "there is no folder /no/such/folder"),
        ({"--temperature": "1"}, "add --seed"),
    ],
)
def test_a_trace_is_refused_before_a_model_is_loaded(
    bozza: Command,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Path,
    tmp_path: Path,
    changes: dict[str, str],
    says: str,
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model is loaded before the mistake is seen"))
    given = {"--draft": "ngram", "--prompts": str(prompts), "--out": str(tmp_path / "traces.jsonl")} | changes
    code, out, err = bozza("trace", *(part for pair in given.items() for part in pair))
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "traces.jsonl").exists()
