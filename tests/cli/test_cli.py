"""The command line, as a person calls it."""

import gc
import json
import re

import pytest

from bozza import LLM, ConfigError, SamplingParams
from bozza.cli import options
from products import needs_int8


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
    flags = ["--policy", "fixed", *(flag for text in draft for flag in ("--draft", text.format_map(folders)))]
    out = bozza("generate", "abab", "-m", folders["target"], "-n", 40, "--ignore-eos", "--json", *flags)[1]
    drafted = json.loads(out)["outputs"][0]["stats"]["drafted"]
    assert set(drafted) == {text.partition(":")[0] for text in draft}


def test_report_131_off_means_no_drafting(bozza, folders):
    out = bozza("generate", "abab", "-m", folders["target"], "-n", 20, "--policy", "off", "--json")[1]
    stats = json.loads(out)["outputs"][0]["stats"]
    assert stats["drafted"] == {}
    assert stats["passes"] == stats["committed"]


SET = {
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "logit_bias": {"70": -3.0, "71": 2.5},
    "bad_words": ["a", [5, 6]],
    "stop_token_ids": [60],
    "min_tokens": 3,
}


def test_set_reaches_every_other_parameter(bozza, folders):
    flags = [flag for name, value in SET.items() for flag in ("--set", f"{name}={json.dumps(value)}")]
    out = bozza(
        "generate", "abab", "-m", folders["target"], "-n", 20, "-t", 0.9, "--seed", 4, "--json", *flags
    )[1]  # fmt: skip
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4, **SET)
    expected = LLM(folders["target"], policy="off").generate("abab", params)[0]
    assert json.loads(out)["outputs"][0]["token_ids"] == expected.token_ids
    pairs = [flag for flag in flags if flag != "--set"]
    assert options.sampling(20, 0.9, None, None, 4, more=pairs) == params


@pytest.mark.parametrize(
    "pair", ["presence_penalty=1.5", "typical_p=0.3", "allowed_token_ids=[40, 41, 42]", "bad_words=a"]
)
def test_set_changes_the_output(bozza, folders, pair):
    args = ("generate", "abab", "-m", folders["target"], "-n", 20, "-t", 0.9, "--seed", 4)
    name, _, value = pair.partition("=")
    given = json.loads(value) if name != "bad_words" else value  # what is no JSON is text
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4, **{name: given})
    assert bozza(*args, "-s", pair)[1] == LLM(folders["target"], policy="off").generate("abab", params)[0].text + "\n"
    if name != "bad_words":
        assert bozza(*args, "-s", pair)[1] != bozza(*args)[1]


def test_several_outputs_are_printed_one_after_the_other(bozza, folders):
    args = ("generate", "ab", "cd", "-m", folders["target"], "-n", 6, "-t", 1, "--seed", 3, "--set", "n=3")
    document = json.loads(bozza(*args, "--json")[1])
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3)
    expected = LLM(folders["target"]).generate(["ab", "cd"], params)
    for entry, out in zip(document["outputs"], expected, strict=True):
        samples = [entry, *entry["others"]]
        assert [sample["token_ids"] for sample in samples] == [sample.token_ids for sample in out.samples]
        assert [sample["text"] for sample in samples] == [sample.text for sample in out.samples]
        assert [sample["stats"]["committed"] for sample in samples] == [len(s.token_ids) for s in out.samples]
        assert all("others" not in sample and "prompt" not in sample for sample in entry["others"])
    code, printed, err = bozza(*args)
    assert code == 0
    assert printed == "".join(
        prompt + sample.text + "\n"
        for prompt, out in zip(("ab", "cd"), expected, strict=True)
        for sample in out.samples
    )
    assert err.count("per pass") == 6


def test_one_output_has_no_others(bozza, folders):
    document = json.loads(bozza("generate", "ab", "-m", folders["target"], "-n", 3, "--json")[1])
    assert set(document["outputs"][0]) == {"prompt", "text", "token_ids", "finish_reason", "stats"}


def test_logprobs_are_part_of_the_json(bozza, folders):
    args = ("generate", "abc", "-m", folders["target"], "-n", 5, "--ignore-eos", "--json")
    entry = json.loads(bozza(*args, "--set", "logprobs=2", "--set", "prompt_logprobs=0")[1])["outputs"][0]
    assert [found["token"] for found in entry["logprobs"]] == entry["token_ids"]
    assert all(found["rank"] == 1 and found["top"][0][0] == found["token"] for found in entry["logprobs"])
    assert all(len(found["top"]) == 2 and found["logprob"] == found["top"][0][1] < 0 for found in entry["logprobs"])
    assert entry["prompt_logprobs"][0] is None
    assert [found["top"] for found in entry["prompt_logprobs"][1:]] == [[], []]


@pytest.mark.parametrize("as_json", [True, False])
def test_stop_ends_the_output_before_the_first_of_its_texts(bozza, folders, as_json):
    llm = LLM(folders["target"])
    whole = llm.generate("abcabc", SamplingParams(max_tokens=40, ignore_eos=True))[0].text
    stops = re.findall(r"[!-~]{2}", whole)[-2:]
    assert len(stops) == 2
    args = (
        "generate",
        "abcabc",
        "-m",
        folders["target"],
        "-n",
        40,
        "--ignore-eos",
        "--stop",
        stops[0],
        "--stop",
        stops[1],
    )
    out = bozza(*args, *(["--json"] if as_json else []))[1]
    text = whole[: min(whole.index(stop) for stop in stops)]
    if as_json:
        assert json.loads(out)["outputs"][0]["text"] == text
        assert json.loads(out)["outputs"][0]["finish_reason"] == "stop"
    else:
        assert out == text + "\n"


SCHEMA = {
    "type": "object",
    "properties": {"sex": {"enum": ["f", "m"]}, "old": {"type": "boolean"}},
    "required": ["sex", "old"],
    "additionalProperties": False,
}


def test_json_schema_regex_and_grammar_bind_the_output(bozza, folders, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "<" ("é" | "x")~2 ">"\n', encoding="utf-8")
    args = ("generate", "abc", "-m", folders["target"], "-n", 60)
    code, out, err = bozza(*args, "--policy", "fixed", "--json-schema", schema)
    assert code == 0
    assert set(json.loads(out)) == {"sex", "old"}
    assert "grammar:" in err  # who drafted the keys
    assert re.fullmatch("[xyz]{3}(ok)?\n", bozza(*args, "--regex", "[xyz]{3}(ok)?", "-t", 1)[1])
    assert re.fullmatch("<[éx]{2}>\n", bozza(*args, "--grammar", grammar)[1])
    entry = json.loads(bozza(*args, "--json-schema", schema, "--json", "--set", "n=2", "-t", 1)[1])["outputs"][0]
    assert [set(json.loads(one["text"])) for one in (entry, *entry["others"])] == [{"sex", "old"}] * 2


def test_chat_knows_stop_set_and_structured_output(bozza, folders):
    args = ("chat", "hi", "-m", folders["target"], "-n", 30)
    assert re.fullmatch("(yes|no)\n", bozza(*args, "--regex", "yes|no")[1])
    document = json.loads(bozza(*args, "--regex", "yes|no", "--stop", "e", "--stop", "o", "--json")[1])
    assert document["text"] in ("y", "n")
    document = json.loads(bozza(*args, "--set", "logprobs=0", "--json")[1])
    assert len(document["logprobs"]) == len(document["token_ids"])
    code, _, err = bozza(*args, "-t", 1, "--set", "n=2")
    assert code == 2
    assert "a conversation goes on from one answer, n is 2" in err.replace("\n", " ")


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_rule_reaches_the_engine(bozza, folders, rule):
    draft = ("--policy", "fixed", "--draft", f"model:{folders['shallow']}")
    args = ("generate", "abc", "-m", folders["target"], "-n", 24, "--ignore-eos", "--json", "--rule", rule, *draft)
    greedy = json.loads(bozza(*args)[1])["outputs"][0]["token_ids"]
    assert greedy == LLM(folders["target"]).generate("abc", SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
    sampled = json.loads(bozza(*args, "-t", 1, "--seed", 3)[1])["outputs"][0]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    plain = LLM(folders["target"], policy="off").generate("abc", params)[0].token_ids
    assert (sampled["token_ids"] == plain) == (rule == "coupled")  # the others toss other coins
    assert sampled["stats"]["accepted"]["model"] > 0


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
        (["generate", "x", "--policy", "clever"], "no policy 'clever': use adaptive, fixed, off"),
        (["generate", "x", "--top-p", "0.9"], "--top-p has no effect on greedy decoding"),
        (["generate", "x", "--top-k", "5"], "--top-k has no effect"),
        (["generate", "x", "--seed", "5"], "--seed has no effect"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "x", "--batch", "0"], "use at least 1"),
        (["generate", "x", "--model", "/no/such"], "no model '/no/such'"),
        (["generate", "x", "--device", "tpu9"], "use auto, cpu"),
        (["generate", "x", "--dtype", "int3"], "dtype 'int3'"),
        (["generate", "x", "--quantize", "int3"], "quantize 'int3': use int8, or leave it out"),
        (["generate", "x", "--quantize", "int8"], "quantize int8"),  # it has float32, or the processor no int8
        (["generate", "x", "--threads", "0"], "--threads 0: use 1 to 1024, or leave it out"),
        (["generate", "x", "--threads", "2000"], "--threads 2000: use 1 to 1024"),
        (["generate", ""], "prompt is empty"),
        (["chat", "--json"], "give it as an argument"),
        (["bench", "--prompts", "/no/such.jsonl"], "there is no such file"),
        (["bench", "--prompts", __file__, "--out", "/no/such/x.json"], "there is no folder"),
        (["bench", "--prompts", __file__, "--temperature", "1"], "add --seed"),
        (["models", "pull", "smol"], "no model 'smol'"),
        (["generate", "x", "--rule", "greedy"], "no rule 'greedy': use coupled, rejection or block"),
        (["generate", "x", "--stop", ""], "an empty stop string"),
        (["generate", "x", "--set", "min_p=0.1"], "--set min_p has no effect on greedy decoding"),
        (["generate", "x", "--set", "typical_p=0.1"], "--set typical_p has no effect on greedy decoding"),
        (["generate", "x", "--set", "n=2"], "--set n has no effect on greedy decoding"),
        (["generate", "x", "--set", "temperature=1"], "temperature has a flag of its own"),
        (["generate", "x", "--set", "stop=x"], "stop has a flag of its own"),
        (["generate", "x", "--set", "minp=1"], "--set minp=1: write NAME=VALUE, with one of allowed_token_ids"),
        (["generate", "x", "--set", "min_p"], "--set min_p: write NAME=VALUE"),
        (["generate", "x", "--set", "logits_processors=print"], "write NAME=VALUE"),
        (["generate", "x", "--set", "repetition_penalty=0"], "repetition_penalty is 0"),
        (["generate", "x", "--set", "logprobs=many"], "logprobs is 'many': use a whole number"),
        (["generate", "x", "--set", 'logit_bias={"999": 1}'], "logit_bias: there is no token 999"),
        (["generate", "x", "--regex", "("], "structured output"),
        (["generate", "x", "--regex", "a", "--json-schema", __file__], "exactly one of json_schema, regex and grammar"),
        (["generate", "x", "--regex", "a", "--set", "allowed_token_ids=[5]"], "allowed_token_ids and structured"),
        (["generate", "x", "--json-schema", "/no/such.json"], "--json-schema /no/such.json: cannot be read"),
        (["generate", "x", "--json-schema", __file__], "this is not a JSON schema"),
        (["generate", "x", "--grammar", "/no/such.lark"], "--grammar /no/such.lark: cannot be read"),
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


@pytest.mark.parametrize(
    "pair",
    ["repetition_penalty=strong", "stop_token_ids=5", "bad_words=5", 'logit_bias={"x": 1}', "presence_penalty=null"],
)
def test_values_of_a_wrong_kind_are_one_line_too(bozza, folders, pair):
    code, out, err = bozza("generate", "x", "-m", folders["target"], "-n", 3, "--set", pair)
    assert (code, out) == (2, "")
    assert err.strip().startswith("error:")
    assert len(err.strip().splitlines()) == 1


def test_a_name_that_is_set_twice_is_refused(bozza, folders):
    args = ("generate", "x", "-m", folders["target"], "-n", 3)
    code, _, err = bozza(*args, "--set", "bad_words=a", "--set", "bad_words=b")
    assert code == 2
    assert "bad_words" in err


@pytest.fixture
def asked(monkeypatch):
    """How models were to be loaded, which does not happen, and with how many threads."""
    loads, threads = [], []

    def stop(*_, **options):
        loads.append(options)
        raise ConfigError("that was all")

    monkeypatch.setattr("bozza.LLM", stop)
    monkeypatch.setattr("bozza.threads.use_threads", threads.append)
    return loads, threads


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "trace", "tune", "verify"])
def test_every_command_knows_on_what_to_compute(bozza, asked, tmp_path, command):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n')
    first = {"generate": ["x"], "chat": ["x"], "verify": []}.get(command, ["--prompts", prompts])
    if command == "trace":
        first += ["--out", tmp_path / "out.jsonl", "--draft", "ngram"]
    loads, threads = asked
    flags = ("--quantize", "int8", "--compile", "--threads", 3, "--dtype", "bfloat16", "--device", "cpu")
    for given in (flags, ()):
        code, _, err = bozza(command, *first, "--model", "m", *given)
        assert (code, err.strip()) == (2, "error: that was all")
    chosen = [tuple(options[name] for name in ("quantize", "compile", "dtype", "device")) for options in loads]
    assert chosen == [("int8", True, "bfloat16", "cpu"), (None, False, "auto", "auto")]
    assert threads == [3, None]


@needs_int8
def test_a_quantized_model_is_held_to_its_own_words(bozza, folders):
    on = ("--dtype", "bfloat16", "--device", "cpu", "--quantize", "int8")
    args = ("generate", "abab", "-m", folders["target"], "-n", 24, "--ignore-eos", "--json", *on)
    llm = LLM(folders["target"], policy="off", dtype="bfloat16", device="cpu", quantize="int8")
    expected = llm.generate("abab", SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
    for flags in (["--policy", "off"], ["--policy", "fixed", "--draft", f"model:{folders['shallow']}"]):
        assert json.loads(bozza(*args, *flags)[1])["outputs"][0]["token_ids"] == expected
    code, out, _ = bozza("verify", "-m", folders["target"], "-n", 12, "--samples", 200, "-d", "ngram", *on, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (0, True), document["checks"]
    assert document["environment"]["weights"] == "int8"


def test_unknown_options_are_refused(bozza):
    code, _, err = bozza("generate", "x", "--drafts", "ngram")
    assert code == 2
    assert "No such option" in err


def test_report_122_help_names_every_option(bozza):
    out = bozza("generate", "--help")[1]
    for flag in (
        "--model", "--draft", "--policy", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--dtype",
        "--device", "--batch", "--json", "--set", "--stop", "--json-schema", "--regex", "--grammar", "--rule",
        "--show", "--trace", "--quantize", "--compile", "--threads",
    ):  # fmt: skip
        assert flag in out


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_a_history_file_is_used_from_one_call_to_the_next(bozza, folders, tmp_path, command):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "history"
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n")
    first = ("--prompts", prompts) if command == "bench" else ("abc",)
    args = (command, *first, "-m", folders["target"], "--policy", "fixed", "-d", "suffix", "-n", 30, "--json")
    args += ("--history-file", file)

    def per_pass():
        code, out, _ = bozza(*args)
        assert code == 0
        gc.collect()  # an end of the process for a history that is written at exit
        document = json.loads(out)
        if command == "bench":
            assert document["environment"]["shared_history"] is True
            return document["rows"][-1]["committed_per_pass"]
        stats = (document["outputs"][0] if command == "generate" else document)["stats"]
        return stats["committed"] / stats["passes"]

    before = per_pass()
    assert file.is_file()
    assert per_pass() > before


def test_shared_history_is_for_one_call(bozza, folders):
    args = ("generate", "abc", "abc", "-m", folders["target"], "--policy", "fixed", "-d", "suffix", "-n", 30)
    args += ("--batch", 1, "--json")

    def passes(*flags):
        return [entry["stats"]["passes"] for entry in json.loads(bozza(*args, *flags)[1])["outputs"]]

    alone, shared = passes(), passes("--shared-history")
    assert alone[0] == alone[1] == shared[0]
    assert shared[1] < shared[0]


@pytest.mark.parametrize("flags", [["--shared-history"], ["--history-file", "history"]])
def test_a_history_without_a_drafter_for_it_is_refused(bozza, flags):
    code, _, err = bozza("generate", "abc", "-m", "/no/model", *flags)
    assert code == 2
    assert err.startswith("error: only drafter 'suffix' uses a shared history")
