"""Where a text ends and how it is handed out: stop strings, end tokens and limits that a block of drafts crosses."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from bozza import LLM, ConfigError, SamplingParams
from bozza.text import decode

PROMPTS = ["hello world", "abcabcabcabc"]
DRAFTS = {
    "off": None,
    "ngram": ["ngram:k=4"],
    "model": ["model:{shallow}"],
    "itself": ["model:{target},k=7"],  # always right: blocks are as long as they may be
    "both": ["ngram:k=3", "model:{shallow}"],
}
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def drafting(folders):
    return LLM(folders["target"], draft=[f"model:{folders[name]}" for name in ("target", "shallow")])


@pytest.fixture(scope="module")
def llms(drafting, folders):
    made = {"off": drafting.with_policy("off")}
    for name, draft in DRAFTS.items():
        if draft is not None:
            made[name] = drafting.with_policy("fixed", [text.format_map(folders) for text in draft])
    return made


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def whole(request, llms):
    """(parameters, plain outputs): what the model says where nothing ends it."""
    params = GREEDY if request.param == "greedy" else SAMPLED
    return params, llms["off"].generate(PROMPTS, params)


def first_end(tokenizer, ids, stop):
    """(tokens, text) up to the token with which the decoding first holds the stop string."""
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count])
        if stop in text:
            return count, text[: text.index(stop)]
    raise AssertionError(f"{stop!r} is not in the text")


def some_stops(text, length, most):
    """Real substrings without unfinished characters, spread over the text."""
    found = [text[i : i + length] for i in range(len(text) - length + 1)]
    found = [stop for stop in found if "\ufffd" not in stop]
    return found[:: max(1, len(found) // most)][:most]


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("draft", DRAFTS)
def test_report_5_7_a_stop_string_cuts_text_tokens_logprobs_and_counts_at_one_token(llms, whole, draft, length):
    llm, (params, outputs) = llms[draft], whole
    prompts, stops, ends = [], [], []
    for prompt, plain in zip(PROMPTS, outputs, strict=True):
        for stop in some_stops(plain.text, length, 5):
            prompts.append(prompt)
            stops.append(stop)
            ends.append((plain, *first_end(llm.tokenizer, plain.token_ids, stop)))
    assert len({count % 8 for _, count, _ in ends}) >= 4  # at many places of a block
    for out, (plain, count, text) in zip(
        llm.generate(prompts, [replace(params, stop=[stop]) for stop in stops]), ends, strict=True
    ):
        assert out.text == text
        assert out.token_ids == plain.token_ids[:count]
        assert [entry.token for entry in out.logprobs] == out.token_ids
        assert [entry.logprob for entry in out.logprobs] == pytest.approx(
            [entry.logprob for entry in plain.logprobs[:count]], abs=1e-4
        )
        assert out.stats.committed == count
        assert out.finish_reason == "stop"
        assert out.stats.accepted.total() <= count


@pytest.mark.parametrize("draft", ["off", "itself", "both"])
def test_chunks_add_up_to_the_text_and_hold_no_beginning_of_a_stop_string(llms, whole, draft):
    llm, (params, outputs) = llms[draft], whole
    for prompt, plain in zip(PROMPTS, outputs, strict=True):
        for stop in [None, *some_stops(plain.text, 3, 2)]:
            chosen = replace(params, stop=[stop, "never said"] if stop else [])
            expected = llm.generate(prompt, chosen)[0]
            stream = llm.stream(prompt, chosen)
            chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == expected.text
            assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids == stream.token_ids
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == expected.finish_reason == ("stop" if stop else "length")
            assert stream.stats.committed == len(expected.token_ids)
            if stop is None:
                longest = max(len(chunk.token_ids) for chunk in chunks)
                assert longest in {"off": [1], "itself": [8], "both": [2, 3, 4, 5]}[draft]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_first_of_several_stop_strings_counts(llms, whole, draft):
    llm, (params, outputs) = llms[draft], whole
    for prompt, plain in zip(PROMPTS, outputs, strict=True):
        stops = some_stops(plain.text, 2, 6)
        ends = [first_end(llm.tokenizer, plain.token_ids, stop) for stop in stops]
        out = llm.generate(prompt, replace(params, stop=stops))[0]
        assert (len(out.token_ids), out.text) == min(ends)


@pytest.mark.parametrize("draft", ["off", "itself", "both"])
def test_a_stop_string_does_not_count_before_min_tokens(llms, whole, draft):
    """The letter is said again and again; it ends the output only where the minimum is reached."""
    llm, (params, outputs) = llms[draft], whole
    for prompt, plain in zip(PROMPTS, outputs, strict=True):
        texts = [decode(llm.tokenizer, [token]) for token in plain.token_ids]
        stop = max(set(texts) - {"\ufffd", ""}, key=texts.count)
        places = [place for place, text in enumerate(texts) if text == stop]
        assert len(places) >= 2
        chosen = [replace(params, stop=stop, min_tokens=place + 1) for place in places]
        for place, out in zip(places, llm.generate([prompt] * len(places), chosen), strict=True):
            assert out.token_ids == plain.token_ids[: place + 1]
            assert out.text == decode(llm.tokenizer, plain.token_ids[:place])


@pytest.mark.parametrize("draft", DRAFTS)
def test_report_4_9_what_comes_first_ends_the_output(llms, whole, draft):
    """An end token, a stop string and the limit, each a token before, at and after the others."""
    llm, (params, outputs) = llms[draft], whole
    plain = outputs[0]
    ids = plain.token_ids
    stop = some_stops(plain.text[8:], 2, 1)[0]
    count, text = first_end(llm.tokenizer, ids, stop)
    ends = range(count - 2, count + 2)
    chosen = [replace(params, stop=stop, max_tokens=end) for end in ends]
    chosen += [replace(params, stop=stop, stop_token_ids=[ids[end - 1]]) for end in ends]
    outputs = llm.generate(PROMPTS[:1] * len(chosen), chosen)
    for end, limited, ended in zip(ends, outputs[:4], outputs[4:], strict=True):
        assert limited.token_ids == ids[: min(end, count)]
        assert limited.finish_reason == ("stop" if end >= count else "length")
        assert limited.text == (text if end >= count else decode(llm.tokenizer, ids[:end]))
        assert ended.token_ids == ids[: min(ids.index(ids[end - 1]) + 1, count)]
        assert ended.finish_reason == "stop"


@pytest.mark.parametrize("draft", DRAFTS)
def test_report_2_10_an_end_token_at_any_place_is_kept_and_not_shown(llms, draft):
    """The model's own end token is made so likely that it comes soon, at another place for each seed."""
    llm = llms[draft]
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed, logit_bias={2: 4.0}) for seed in range(24)]
    outputs = llm.generate(PROMPTS[:1] * len(params), params)
    plain = llms["off"].generate(PROMPTS[:1] * len(params), params)
    assert [(out.token_ids, out.text) for out in outputs] == [(out.token_ids, out.text) for out in plain]
    for out in outputs:
        assert 2 not in out.token_ids[:-1]
        assert out.finish_reason == ("stop" if out.token_ids[-1] == 2 else "length")
        assert "</s>" not in out.text
    assert {1, 2, 3, 4, 5} <= {len(out.token_ids) for out in outputs}
    chunks = list(llm.stream(PROMPTS[0], params[1]))
    assert "".join(chunk.text for chunk in chunks) == outputs[1].text


@pytest.mark.parametrize("draft", ["off", "itself", "both"])
def test_an_unfinished_character_comes_with_the_last_chunk(llms, draft):
    """`Ã` begins a character of two bytes: it waits, and is shown for what it is when nothing follows."""
    llm = llms[draft]
    lead = llm.tokenizer.convert_tokens_to_ids("Ã")
    params = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[lead])
    chunks = list(llm.stream("abc", params))
    assert "".join(chunk.text for chunk in chunks) == "\ufffd" * 3
    assert all(chunk.text == "" for chunk in chunks[:-1])
    follow = llm.tokenizer("é")["input_ids"]
    params = replace(
        params, max_tokens=2, allowed_token_ids=follow, bad_words=[[follow[1], follow[1]], [follow[0]] * 2]
    )
    chunks = list(llm.stream("abc", replace(params, logit_bias={follow[0]: 50.0})))
    assert "".join(chunk.text for chunk in chunks) == "é"


def test_a_stream_is_one_output(drafting):
    with pytest.raises(ConfigError, match="a stream is one output, n is 2"):
        drafting.stream("abc", SamplingParams(n=2, temperature=1.0))
    assert drafting.engine.idle


def test_a_stop_string_needs_a_tokenizer_and_nothing_else_does(target):
    llm = LLM(target, draft=["ngram"])
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    chunks = list(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == stream.token_ids
    assert all(chunk.text == "" for chunk in chunks)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.stream([5, 6, 7], SamplingParams(stop="x"))
    assert llm.engine.idle


def test_streams_with_stop_strings_may_be_read_in_turns_and_left(llms, whole):
    llm, (params, outputs) = llms["both"], whole
    stops = [some_stops(plain.text[10:], 2, 1)[0] for plain in outputs]
    expected = [llm.generate(p, replace(params, stop=s))[0].text for p, s in zip(PROMPTS, stops, strict=True)]
    streams = [llm.stream(p, replace(params, stop=s)) for p, s in zip(PROMPTS, stops, strict=True)]
    left = llm.stream("abc", replace(params, stop="never said"))
    next(left)
    del left
    gc.collect()
    texts = [""] * len(streams)
    running = dict(enumerate(streams))
    while running:
        for i, stream in list(running.items()):
            chunk = next(stream, None)
            if chunk is None:
                del running[i]
            else:
                texts[i] += chunk.text
    assert texts == expected
    assert llm.engine.idle


def test_a_chunk_knows_what_it_is_worth(llms, whole):
    """`drafters` names who guessed each token, and the counts of the request agree."""
    llm, (params, _) = llms["itself"], whole
    stream = llm.stream(PROMPTS[0], replace(params, stop="never said"))
    chunks = list(stream)
    names = [name for chunk in chunks for name in chunk.drafters]
    assert len(names) == len(stream.token_ids)
    assert names.count("model") == stream.stats.accepted["model"] > 20
    assert all(chunk.drafters[:-1] == ["model"] * (len(chunk.drafters) - 1) for chunk in chunks)
