import itertools
import json
from types import MappingProxyType

import numpy as np
import pytest
from transformers import MinLengthLogitsProcessor

from bozza import LLM, ConfigError, PromptError, SamplingParams, Structured
from bozza.bench import Case, Tally, against_theory, load_cases, params_document, run_bench, runs_needed
from bozza.cli import show
from bozza.core import StepStats
from bozza.theory import best_gamma, walltime_factor


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders["target"], policy="fixed", draft=["ngram", f"model:{folders['shallow']}"], max_batch=4)


def cases():
    return [Case("copy", [5, 6, 7] * 6), Case("copy", [8, 9] * 4), Case("copy", [9] * 7), Case("noise", [11, 57, 90])]


@pytest.mark.parametrize(("batch", "repeat", "runs"), [(1, 1, 8), (2, 1, 6), (4, 2, 8)])
def test_the_document_holds_what_was_measured(llm, batch, repeat, runs):
    ticks = itertools.count()
    done = []
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    document = run_bench(
        llm,
        cases(),
        params,
        batch=batch,
        repeat=repeat,
        clock=lambda: float(next(ticks)),
        on_run=lambda: done.append(1),
    )
    assert len(done) == runs == runs_needed(llm, cases(), batch, repeat)
    rows = {(row["workload"], row["policy"]): row for row in document["rows"]}
    assert set(rows) == set(itertools.product(("copy", "noise", "all"), ("off", "fixed")))
    for (workload, policy), row in rows.items():
        assert row["tokens"] == 12 * repeat * {"copy": 3, "noise": 1, "all": 4}[workload]
        assert row["tokens_per_s"] == row["tokens"] / row["seconds"]
        assert row["ratio_to_off"] == pytest.approx(row["tokens_per_s"] / rows[workload, "off"]["tokens_per_s"])
        assert row["identical"] is True
        assert set(row["seconds_by_stage"]) == {"plan", "draft", "verify", "sample", "other"}
        if policy == "off":
            assert (row["committed_per_pass"], row["drafters"], row["ratio_median"]) == (1.0, {}, 1.0)
        else:
            assert row["committed_per_pass"] >= 1.0
            assert set(row["drafters"]) <= {"ngram", "model"}
            assert all(d["accepted"] <= d["tested"] <= d["drafted"] for d in row["drafters"].values())
            assert row["theory"] is None or set(row["drafters"]) == {"model"}, "ngram's tokens are not the model's"
    total, parts = rows["all", "fixed"], (rows["copy", "fixed"], rows["noise", "fixed"])
    assert total["seconds_by_stage"]["verify"] == pytest.approx(sum(p["seconds_by_stage"]["verify"] for p in parts))
    assert "ngram" in total["drafters"]
    assert all(rows[workload, "off"]["theory"] is None for workload in ("copy", "noise", "all"))
    assert (document["environment"]["draft"], document["environment"]["rule"]) == (list(llm.draft), "coupled")
    assert document["environment"]["weights"] == llm.weights == "plain"
    json.dumps(document)


def test_differences_are_found_and_judged(llm, monkeypatch):
    """Negative control: a run that is not identical says so."""
    generate = LLM.generate

    def tampered(self, prompts, params, **options):
        outputs = generate(self, prompts, params, **options)
        if self.policy == "fixed" and params.max_tokens > 8:
            for out in outputs:
                out.token_ids[3] = (out.token_ids[3] + 1) % 200
        return outputs

    monkeypatch.setattr(LLM, "generate", tampered)
    rows = run_bench(llm, cases()[:1], SamplingParams(max_tokens=12, ignore_eos=True))["rows"]
    assert [row["identical"] for row in rows] == [True, False]
    assert rows[1]["differences"][0]["position"] == 3
    assert rows[1]["differences"][0]["verdict"] == "bug"


@pytest.fixture(scope="module")
def models(folders):
    """Drafts with whichever models a test asks for: the target itself, which is never wrong, and others."""
    draft = [f"model:{folders[name]}" for name in ("target", "shallow", "stranger")]
    return LLM(folders["target"], policy="fixed", draft=draft, max_batch=4)


def row_of(llm, workload="copy", *, batch=1, **params):
    document = run_bench(llm, cases(), SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params), batch=batch)
    json.dumps(document)
    return next(row for row in document["rows"] if (row["workload"], row["policy"]) == (workload, "fixed"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("workload", ["copy", "noise", "all"])
def test_a_model_drafter_is_held_against_theory(models, folders, batch, workload):
    row = row_of(models.with_policy("fixed", ["grammar", f"model:{folders['shallow']},k=3"]), workload, batch=batch)
    drafter, theory = row["drafters"]["model"], row["theory"]
    assert set(row["drafters"]) == {"model"}
    assert drafter["accepted"] < drafter["tested"] < drafter["drafted"], "what follows a miss is not tested"
    assert theory["alpha"] == drafter["accepted"] / drafter["tested"]
    assert theory["c"] > 0.0
    assert theory["gamma"] == 3
    assert theory["expected"] == walltime_factor(theory["alpha"], 3, theory["c"])
    assert theory["measured"] == row["ratio_to_off"]
    assert theory["best_gamma"] == best_gamma(theory["alpha"], theory["c"])


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_always_right(models, folders, rule, temperature):
    llm = models.with_policy("fixed", [f"model:{folders['target']},k=2"], rule=rule)
    row = row_of(llm, temperature=temperature, seed=3 if temperature else None)
    assert row["drafters"]["model"]["tested"] == row["drafters"]["model"]["drafted"]
    assert row["theory"]["alpha"] == 1.0


def test_theory_is_silent_where_it_does_not_apply(models, folders):
    shallow = f"model:{folders['shallow']}"
    assert row_of(models)["theory"] is None, "several model drafters"
    twins = row_of(models.with_policy("fixed", [f"model:{folders['target']}", f"model:{folders['target']},k=2"]))
    assert (set(twins["drafters"]), twins["theory"]) == ({"model"}, None), "the second costs time and gets no credit"
    assert row_of(models.with_policy("fixed", ["ngram", shallow]))["theory"] is None, "another drafter drafted too"
    assert row_of(models.with_policy("fixed", ["ngram"]))["theory"] is None, "no model drafter"
    alone = models.with_policy("fixed", [f"{shallow},k=8"])
    assert row_of(alone)["theory"] is not None
    assert row_of(alone, max_tokens=8)["theory"] is None, "no draft of full length"
    assert row_of(alone, max_tokens=1)["theory"] is None, "no draft at all"


def step(rows=1, read=None, drafted=0, tested=0, accepted=0, verify=1.0, draft=0.0):
    """A step in which a model drafter, if it was asked, took `draft` seconds; `read` are the tokens beside drafts."""
    counts = [{"model": n} if n else {} for n in (drafted, tested, accepted)]
    seconds = {"draft": draft, "verify": verify, "sample": 0.0, "other": 0.0}
    return StepStats(rows, (read or rows) + drafted, 0, 0, *counts, seconds, {"model": draft} if draft else {})


def tally(*steps, speed=1.0):
    made = Tally(tokens=100, seconds=100 / speed)
    for each in steps:
        made.add_step(each)
    return made


def test_cost_is_that_of_steps_which_decode_in_full_at_the_same_batch():
    off = tally(
        step(rows=2, read=30, verify=90.0),  # prompts
        step(rows=2, verify=80.0),
        *[step(rows=2, verify=spent) for spent in (9.0, 10.0, 12.0)],
        step(rows=1, verify=5.0),
    )
    fixed = tally(
        step(rows=2, read=30, verify=90.0),
        step(rows=2, drafted=8, tested=5, accepted=4, draft=70.0),  # the drafter reads the prompts
        *[step(rows=2, drafted=8, tested=4, accepted=2, draft=spent) for spent in (7.0, 8.0, 30.0)],
        step(rows=2, read=9, drafted=4, tested=1, draft=60.0),  # one decodes, another reads its prompt
        step(rows=2, drafted=8, tested=3, accepted=1, draft=60.0),
        step(rows=2, drafted=5, tested=2, accepted=1, draft=5.5),  # one is at its end: its draft is short
        step(rows=1, drafted=4, tested=1, draft=3.0),
        step(rows=1),
        speed=1.5,
    )
    found = against_theory(fixed, off, "model", 4)
    cost = (8.0 / 4) / 10.0  # four passes of the drafter serve both requests
    alpha = (4 + 3 * 2 + 1 + 1) / (5 + 3 * 4 + 1 + 3 + 2 + 1)
    assert found == {
        "alpha": alpha,
        "c": cost,
        "gamma": 4,
        "expected": walltime_factor(alpha, 4, cost),
        "measured": pytest.approx(1.5),
        "best_gamma": best_gamma(alpha, cost),
    }
    both, plain = Tally(), Tally()
    for _ in range(2):
        both.merge(fixed)
        plain.merge(off)
    assert against_theory(both, plain, "model", 4) == found
    assert against_theory(fixed, tally(step(rows=3), step(rows=3)), "model", 4) is None, "no plain step of that batch"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_keep_the_law_are_not_compared_token_by_token(models, folders, rule, monkeypatch, capsys):
    llm = models.with_policy("fixed", [f"model:{folders['shallow']}"], rule=rule)
    assert row_of(llm)["identical"] is True, "greedy output is the same under every rule"
    monkeypatch.setattr(LLM, "first_difference", None)
    document = run_bench(llm, cases(), SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True))
    assert document["environment"]["rule"] == rule
    for row in document["rows"]:
        assert row["identical"] is (None if row["policy"] == "fixed" else True)
        assert row["differences"] == []
    show.print_bench(document)
    assert capsys.readouterr().out.count("in law") == 3


def test_sampled_outputs_under_coupled_are_compared(models, folders, capsys):
    llm = models.with_policy("fixed", [f"model:{folders['shallow']}"])
    document = run_bench(llm, cases(), SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True))
    assert all(row["identical"] is True for row in document["rows"])
    show.print_bench(document)
    assert "in law" not in capsys.readouterr().out


def test_the_card_says_what_theory_expects_in_a_line_per_workload(models, folders, capsys):
    llm = models.with_policy("fixed", [f"model:{folders['shallow']}"])
    prompts = [Case("[/b]", [5, 6, 7] * 6), Case("w", [8, 9] * 4)]
    document = run_bench(llm, prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    figures = {"alpha": 0.714, "c": 0.279, "gamma": 4, "expected": 1.346, "measured": 1.312, "best_gamma": 3}
    assert set(document["rows"][1]["theory"]) == set(figures)
    document["rows"][1]["theory"] = figures
    document["rows"][3]["theory"] = None
    show.print_bench(document)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model drafter")]
    assert lines[0] == (
        "model drafter, [/b]: alpha 0.71 · c 0.28 · gamma 4 · expected 1.35x · measured 1.31x · best gamma 3"
    )
    assert [line.partition(":")[0] for line in lines[1:]] == ["model drafter, all"]


class Processor:
    def __call__(self, ids, scores):
        return scores


def test_any_parameters_are_written_as_json(llm):
    params = SamplingParams(
        max_tokens=np.int64(4),
        temperature=np.float32(0.5),
        seed=np.int64(7),
        logit_bias={5: 1.0},
        bad_words=((8, 9),),
        logits_processors=[Processor(), MinLengthLogitsProcessor(2, 2), Processor.__call__, lambda ids, scores: scores],
        structured=Structured(json_schema=MappingProxyType({"type": "object"})),
    )
    document = params_document(params)
    assert json.loads(json.dumps(document)) == document
    assert document["logits_processors"][:3] == ["Processor", "MinLengthLogitsProcessor", "Processor.__call__"]
    assert document["structured"]["json_schema"] == {"type": "object"}
    assert (document["max_tokens"], document["temperature"], document["seed"]) == (4, 0.5, 7)
    assert (document["logit_bias"], document["bad_words"]) == ({"5": 1.0}, [[8, 9]])
    run = run_bench(llm, cases()[:1], SamplingParams(max_tokens=4, ignore_eos=True, logits_processors=[Processor()]))
    assert json.loads(json.dumps(run))["environment"]["params"]["logits_processors"] == ["Processor"]


def test_several_outputs_of_a_prompt_are_refused(llm, monkeypatch):
    monkeypatch.setattr(LLM, "generate", None)
    with pytest.raises(ConfigError, match=r"n is 3: .*use n=1"):
        run_bench(llm, cases(), SamplingParams(temperature=1.0, seed=1, n=3))


def test_plain_decoding_alone_can_be_measured(llm):
    plain = llm.with_policy("off")
    rows = run_bench(plain, cases()[:1], SamplingParams(max_tokens=4, ignore_eos=True))["rows"]
    assert [(row["policy"], row["ratio_to_off"]) for row in rows] == [("off", 1.0)]


def test_sampling_without_a_seed_cannot_be_compared(llm):
    with pytest.raises(PromptError, match="add one"):
        run_bench(llm, cases(), SamplingParams(temperature=1.0))


def test_prompt_files(llm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"workload": "a", "prompt": "x\u2028y"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"workload": "a", "prompt": "zz"}\n'
    )
    loaded = load_cases(file, llm)
    assert [case.workload for case in loaded] == ["a", "default", "a"]
    assert loaded[0].prompt == llm.encode("x\u2028y")
    assert loaded[1].prompt == llm.encode_chat([{"role": "user", "content": "hi"}])
    assert [case.workload for case in load_cases(file, llm, limit=1)] == ["a", "default"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ("nonsense", r"p.jsonl:1 is not JSON"),
        ('{"prompt": "x"}\n[1]', r"p.jsonl:2: write"),
        ('{"workload": "x"}', "write"),
        ('{"prompt": "x", "mesages": []}', "unknown key 'mesages'"),
        ('{"prompt": "x", "messages": []}', "either"),
        ('{"prompt": 3}', "a prompt is a text"),
        ('{"prompt": ""}', r"p.jsonl:1: the prompt is empty"),
        ('{"messages": ["hi"]}', r"p.jsonl:1: a message needs 'role'"),
        (json.dumps({"prompt": "x" * 300}), r"p.jsonl:1: .*shorten it"),
    ],
)
def test_mistakes_in_prompt_files_name_the_line(llm, tmp_path, text, says):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(PromptError, match=says):
        load_cases(file, llm)
    with pytest.raises(PromptError, match="cannot read"):
        load_cases(tmp_path / "missing.jsonl", llm)
