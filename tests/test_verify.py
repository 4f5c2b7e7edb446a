"""The command that users run on their own model: right where all is right, and not fooled."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from bozza import LLM, ConfigError, PromptError
from bozza.cli import app as cli
from bozza.core import Verdict
from bozza.rules import Block, Coupled, Rejection
from bozza.verify import FALSE_ALARM, deviation, uniforms_of, views_of
from tiny import tiny

NAMES = ["greedy", "seed", "law of coupled", "law of rejection", "law of block"]


def make(target, folders):
    return LLM(target, policy="fixed", draft=["ngram:k=4", f"model:{folders['shallow']},k=4"])


PROMPTS = [[5, 6, 7] * 4, [9], [11, 12, 13, 14]]


class Blind(Coupled):
    """Takes the first drafted token whatever the target says."""

    def verify(self, logits, requests, drafts):
        verdicts = super().verify(logits, requests, drafts)
        return [
            Verdict((0,), (d.tokens[0], v.tokens[-1])) if len(d) else v for d, v in zip(drafts, verdicts, strict=True)
        ]


def verdicts(llm, **options):
    report = llm.verify(PROMPTS, **({"tokens": 40, "samples": 1200} | options))
    assert [check.name for check in report.checks] == NAMES
    assert report.ok == all(check.verdict != "bug" for check in report.checks)
    return {check.name: check.verdict for check in report.checks}, report


def test_all_is_right_where_it_is(target, folders):
    found, report = verdicts(make(target, folders))
    assert set(found.values()) == {"ok"}
    for check in report.checks:
        assert check.figures["accepted"] > 50
        assert check.figures["drafted"] > check.figures["accepted"]
    assert report.checks[-1].figures["false_alarm"] == FALSE_ALARM


def test_a_rule_that_believes_its_drafter_too_often_is_a_bug(target, folders, monkeypatch):
    class Gullible(Rejection):
        def judge(self, laws, draft, request, chance):
            keep = chance.accept
            chance.accept = lambda probability: keep(probability**0.3)
            return super().judge(laws, draft, request, chance)

    monkeypatch.setattr("bozza.llm.RULES", {"coupled": Coupled, "rejection": Gullible, "block": Block})
    found, report = verdicts(make(target, folders), samples=2400)
    assert found["law of rejection"] == "bug"
    assert found["greedy"] == found["law of block"] == "ok"
    assert not report.ok


def test_a_store_that_keeps_the_wrong_branch_is_a_bug(target, folders):
    llm = make(target, folders)
    keep = llm.runner.store.keep
    llm.runner.store.keep = lambda slot, base, kept: keep(slot, base, range(len(kept)))
    found, _ = verdicts(llm)
    assert found["greedy"] == found["seed"] == "bug"


def test_a_rule_that_takes_the_draft_for_the_truth_is_a_bug_even_when_greedy(target, folders, monkeypatch):
    monkeypatch.setattr("bozza.llm.RULES", {"coupled": Blind, "rejection": Rejection, "block": Block})
    found, _ = verdicts(make(target, folders))
    assert found["greedy"] == "bug"


def test_near_ties_of_low_precision_are_no_bugs(folders):
    """In bfloat16 with an attention that rounds otherwise in every shape."""
    model = tiny("gemma2", dtype=torch.bfloat16)
    llm = LLM(model, policy="fixed", draft=["ngram:k=4"])
    report = llm.verify(PROMPTS, tokens=60, samples=600)
    assert report.ok


def test_nothing_to_verify_is_said(target):
    with pytest.raises(ConfigError, match="never drafts"):
        LLM(target, policy="off").verify(PROMPTS)
    with pytest.raises(PromptError, match="has no room for 250 more"):
        LLM(target).verify(PROMPTS, tokens=250)


def test_the_distance_from_uniform_is_the_largest_gap():
    assert deviation(torch.tensor([0.5])) == 0.5
    assert deviation((torch.arange(100, dtype=torch.float64) + 0.5) / 100) == pytest.approx(0.005)
    assert deviation(torch.rand(1000, dtype=torch.float64) ** 2) > 0.2


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_says_it_with_its_exit_code(folders, monkeypatch, capsys, broken, tmp_path):
    if broken:
        monkeypatch.setattr("bozza.llm.RULES", {"coupled": Blind, "rejection": Rejection, "block": Block})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabcabcabc"}\n{"prompt": "xyz"}\n')
    flags = ["--model", folders["target"], "--draft", "ngram:k=3", "--prompts", prompts, "-n", 30, "--samples", 100]
    for mode in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["bozza", "verify", *map(str, flags), *mode])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or 0) == int(broken)
        out = capsys.readouterr().out
        if mode:
            document = json.loads(out)
            assert document["ok"] is not broken
            assert [check["name"] for check in document["checks"]] == NAMES
        else:
            assert ("bug" in out) == broken


class Sure(torch.nn.Module):
    """A model that gives every text the same peaked law."""

    def __init__(self, chance: float, vocab: int = 40) -> None:
        super().__init__()
        rest = (1.0 - chance) / (vocab - 1)
        self.law = torch.tensor([chance, *[rest] * (vocab - 1)]).log()
        self.device = torch.device("cpu")

    def forward(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.law.expand(1, len(logits_to_keep), -1))


@pytest.mark.parametrize("chance", [0.35, 0.97])
@pytest.mark.parametrize("tokens", [1, 2, 16, 300])
def test_a_right_system_passes_with_short_outputs_and_sure_models(chance, tokens):
    """Equal outputs must not count as one: their v are drawn anew."""
    model, draws = Sure(chance), torch.Generator().manual_seed(1)
    outputs = torch.multinomial(model.law.exp(), 2400, replacement=True, generator=draws).view(-1, tokens).tolist()
    found = views_of([uniforms_of(model, [1, 2], output, draws) for output in outputs])
    assert found.shape == (3, 2400)
    bound = (math.log(6 / FALSE_ALARM) / 4800) ** 0.5
    assert max(map(deviation, found)) < bound


def test_numbers_that_are_used_twice_are_noticed_though_each_is_right_by_itself():
    model, draws = Sure(0.1), torch.Generator().manual_seed(1)
    singles = torch.multinomial(model.law.exp(), 1200, replacement=True, generator=draws).tolist()
    uniforms = uniforms_of(model, [1], [token for token in singles for _ in range(2)], draws)
    found = views_of([uniforms])
    bound = (math.log(6 / FALSE_ALARM) / 4800) ** 0.5
    assert deviation(found[0]) < 1.5 * bound
    assert deviation(found[2]) > bound


def test_what_never_drafts_is_not_called_right(target):
    with pytest.raises(ConfigError, match="nothing was drafted"):
        LLM(target, policy="fixed", draft=["grammar"]).verify(PROMPTS)
    with pytest.raises(PromptError, match="write \\[prompt\\]"):
        LLM(target).verify("abc")
    with pytest.raises(ConfigError, match="no prompts"):
        LLM(target).verify([])
    with pytest.raises(ConfigError, match="at least 1 of each"):
        LLM(target).verify(PROMPTS, samples=0)
