import itertools
import json

import pytest

from bozza import LLM, PromptError, SamplingParams
from bozza.bench import Case, load_cases, run_bench, runs_needed


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders["target"], draft=["ngram", f"model:{folders['shallow']}"], max_batch=4)


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
        assert set(row["seconds_by_stage"]) == {"draft", "verify", "sample", "other"}
        if policy == "off":
            assert (row["committed_per_pass"], row["drafters"], row["ratio_median"]) == (1.0, {}, 1.0)
        else:
            assert row["committed_per_pass"] >= 1.0
            assert set(row["drafters"]) <= {"ngram", "model"}
    total, parts = rows["all", "fixed"], (rows["copy", "fixed"], rows["noise", "fixed"])
    assert total["seconds_by_stage"]["verify"] == pytest.approx(sum(p["seconds_by_stage"]["verify"] for p in parts))
    assert document["environment"]["draft"] == list(llm.draft)
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
