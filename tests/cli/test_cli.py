"""The command line, as a person calls it."""

import json

import pytest

from bozza import LLM, SamplingParams
from bozza.cli import app as cli


@pytest.fixture
def bozza(monkeypatch, capsys):
    """Run a command; returns exit code, standard output and standard error."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr("sys.argv", ["bozza", *map(str, arguments)])
        if stdin is not None:
            import io

            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_generate_streams_text_and_reports_what_it_took(bozza, folders):
    expected = LLM(folders["target"]).generate("abcabc", SamplingParams(max_tokens=12))[0]
    code, out, err = bozza("generate", "abcabc", "--model", folders["target"], "--max-tokens", 12)
    assert code == 0
    assert out == expected.text + "\n"
    assert "tokens/s" in err
    assert "per pass" in err


def test_generate_reads_standard_input(bozza, folders):
    args = ("generate", "-m", folders["target"], "-n", 5)
    assert bozza(*args, stdin="abc\n")[1] == bozza(*args, "abc")[1]


def test_generate_json_is_one_document(bozza, folders):
    code, out, _ = bozza(
        "generate", "ab", "cd", "--model", folders["target"], "-n", 6, "--json",
        "--draft", "ngram:min=1,max=4,k=3", "--draft", f"model:{folders['shallow']},k=2",
        "--temperature", 0.8, "--top-p", 0.9, "--top-k", 50, "--seed", 3, "--dtype", "float32", "--batch", 2,
    )  # fmt: skip
    outputs = json.loads(out)["outputs"]
    assert code == 0
    assert [o["prompt"] for o in outputs] == ["ab", "cd"]
    params = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, top_k=50, seed=3)
    plain = LLM(folders["target"], policy="off", dtype="float32").generate(["ab", "cd"], params)
    assert [o["token_ids"] for o in outputs] == [p.token_ids for p in plain]
    assert outputs[0]["stats"]["committed"] == 6
    assert outputs[0]["finish_reason"] == "length"


@pytest.mark.parametrize("draft", [["ngram:k=2"], ["model:{shallow},k=2"], ["ngram:k=2", "model:{stranger},k=2"]])
def test_report_129_each_drafter_flag_reaches_its_drafter(bozza, folders, draft):
    flags = [flag for text in draft for flag in ("--draft", text.format_map(folders))]
    out = bozza("generate", "abab", "-m", folders["target"], "-n", 40, "--ignore-eos", "--json", *flags)[1]
    drafted = json.loads(out)["outputs"][0]["stats"]["drafted"]
    assert set(drafted) == {text.partition(":")[0] for text in draft}


def test_report_131_off_means_no_drafting(bozza, folders):
    out = bozza("generate", "abab", "-m", folders["target"], "-n", 20, "--policy", "off", "--json")[1]
    stats = json.loads(out)["outputs"][0]["stats"]
    assert stats["drafted"] == {}
    assert stats["passes"] == stats["committed"]


def test_chat_answers_one_message(bozza, folders):
    code, out, _ = bozza("chat", "hi", "-m", folders["target"], "-n", 8)
    answer = LLM(folders["target"]).chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=8))
    assert (code, out) == (0, answer.text + "\n")
    document = json.loads(bozza("chat", "hi", "--system", "be", "-m", folders["target"], "-n", 8, "--json")[1])
    assert [m["role"] for m in document["messages"]] == ["system", "user"]


def test_chat_keeps_a_conversation(bozza, folders, monkeypatch):
    lines = iter(["one", "two", ""])
    monkeypatch.setattr("bozza.cli.chat._ask", lambda: next(lines))
    code, out, _ = bozza("chat", "-m", folders["target"], "-n", 6)
    llm, messages, expected = LLM(folders["target"]), [], ""
    for line in ("one", "two"):
        messages.append({"role": "user", "content": line})
        text = llm.chat(messages, SamplingParams(max_tokens=6)).text
        messages.append({"role": "assistant", "content": text})
        expected += text + "\n"
    assert (code, out) == (0, expected)


def test_bench_writes_a_document_and_prints_a_card(bozza, folders, tmp_path):
    prompts, file = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"workload": "w", "prompt": "ababab"}\n{"workload": "v", "prompt": "xyz"}\n')
    args = ("bench", "--prompts", prompts, "-m", folders["target"], "-n", 10, "--ignore-eos")
    code, out, err = bozza(*args, "--out", file)
    assert code == 0
    document = json.loads(file.read_text())
    assert [row["workload"] for row in document["rows"]] == ["w", "w", "v", "v", "all", "all"]
    assert "wrote" in err
    for heading in ("workload", "tokens/s", "ratio", "per pass", "guessed", "identical"):
        assert heading in out
    code, out, _ = bozza(*args, "--json", "--limit", 1)
    assert json.loads(out)["environment"]["params"]["max_tokens"] == 10


def test_models_are_listed_and_pulled(bozza, smollm2, folders):
    listed = json.loads(bozza("models", "list", "--json")[1])["models"]
    assert listed[0]["name"] == "smollm2"
    assert listed[0]["path"] == str(smollm2)
    assert "smollm2" in bozza("models", "list")[1]
    assert json.loads(bozza("models", "pull", "smollm2", "--json")[1])["path"] == str(smollm2)
    assert bozza("models", "pull", folders["target"])[1].strip() == str(folders["target"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "x", "--draft", "ngrams"], "no drafter 'ngrams'"),
        (["generate", "x", "--draft", "ngram:k=0"], "out of range"),
        (["generate", "x", "--policy", "off", "--draft", "ngram"], "never drafts"),
        (["generate", "x", "--policy", "adaptive"], "no policy 'adaptive'"),
        (["generate", "x", "--top-p", "0.9"], "--top-p has no effect on greedy decoding"),
        (["generate", "x", "--top-k", "5"], "--top-k has no effect"),
        (["generate", "x", "--seed", "5"], "--seed has no effect"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "x", "--batch", "0"], "use at least 1"),
        (["generate", "x", "--model", "/no/such"], "no model '/no/such'"),
        (["generate", "x", "--device", "tpu9"], "use auto, cpu"),
        (["generate", "x", "--dtype", "int3"], "dtype 'int3'"),
        (["generate", ""], "prompt is empty"),
        (["chat", "--json"], "give it as an argument"),
        (["bench", "--prompts", "/no/such.jsonl"], "there is no such file"),
        (["bench", "--prompts", __file__, "--out", "/no/such/x.json"], "there is no folder"),
        (["bench", "--prompts", __file__, "--temperature", "1"], "add --seed"),
        (["models", "pull", "smol"], "no model 'smol'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(bozza, folders, arguments, says):
    if arguments[0] == "generate" and "--model" not in arguments:
        arguments = [*arguments, "--model", folders["target"]]
    code, out, err = bozza(*arguments)
    assert code == 2
    assert out == ""
    assert says in err.replace("\n", " ")
    assert err.strip().startswith("error:")
    assert len(err.strip().splitlines()) == 1


def test_unknown_options_are_refused(bozza):
    code, _, err = bozza("generate", "x", "--drafts", "ngram")
    assert code == 2
    assert "No such option" in err


def test_report_122_help_names_every_option(bozza):
    out = bozza("generate", "--help")[1]
    for flag in (
        "--model", "--draft", "--policy", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--dtype",
        "--device", "--batch", "--json",
    ):  # fmt: skip
        assert flag in out
