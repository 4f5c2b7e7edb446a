"""Where a text ends and how it is handed out: stop strings, end tokens and limits that a block of drafts crosses."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza import LLM, ConfigError, SamplingParams
from bozza.stream import Authors, Chunk
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
    return LLM(folders["target"], policy="fixed", draft=[f"model:{folders[name]}" for name in ("target", "shallow")])


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
    llm = LLM(target, policy="fixed", draft=["ngram"])
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


class Bytes:
    """A tokenizer of which only decoding is there: token i is the bytes `parts[i]`, a special token is None."""

    def __init__(self, parts: Sequence[bytes | None]) -> None:
        self.parts = parts

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return b"".join(self.parts[i] or b"" for i in ids).decode("utf-8", errors="replace")


def pieces_of(
    parts: Sequence[bytes | None], authors: Sequence[str | None], held: Sequence[str]
) -> list[tuple[str, str | None]]:
    """The pieces of a stream whose chunks have one token each, and the texts `held`."""
    who = Authors(Bytes(parts))
    chunks = [Chunk(text, [i], [authors[i]], None) for i, text in enumerate(held)]
    return [(piece.text, piece.drafter) for chunk in chunks for piece in who.pieces(chunk)]


def test_each_character_has_the_author_of_its_token() -> None:
    found = pieces_of(
        [b"one ", b"two", None, b" three", b"!"], ["a", None, "a", "b", "b"], ["one ", "two", "", " three", "!"]
    )
    assert found == [("one ", "a"), ("two", None), (" three", "b"), ("!", "b")]


def test_a_character_of_several_tokens_is_a_drafters_if_it_guessed_them_all() -> None:
    face = "\N{SLIGHTLY SMILING FACE}"
    first, second, third = b"hi " + face.encode()[:1], face.encode()[1:2], face.encode()[2:] + b" you"
    held = ["", "", f"hi {face} you"]
    assert pieces_of([first, second, third], ["a", "a", "a"], held) == [(f"hi {face} you", "a")]
    assert pieces_of([first, second, third], ["a", "a", "b"], held) == [("hi ", "a"), (face, None), (" you", "b")]
    assert pieces_of([first, second, third], ["a", None, "a"], held) == [("hi ", "a"), (face, None), (" you", "a")]


def test_a_special_token_has_no_part_in_the_character_after_it() -> None:
    assert pieces_of([None, b"so"], [None, "a"], ["", "so"]) == [("so", "a")]


def test_text_that_waits_for_a_stop_string_keeps_its_author() -> None:
    assert pieces_of([b"a", b"bc", b"d"], ["x", "y", None], ["", "ab", "c"]) == [("a", "x"), ("b", "y"), ("c", "y")]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_authors_do_not_depend_on_blocks_and_pieces_add_up(data: st.DataObject) -> None:
    """Against counting bytes: a character's authors are those of its bytes."""
    text = data.draw(st.text("aé世🙂 ", min_size=1, max_size=12))
    whole, parts = text.encode(), []
    while len(joined := b"".join(parts)) < len(whole):
        parts.append(whole[len(joined) : len(joined) + data.draw(st.integers(1, 6))])
    authors = [data.draw(st.sampled_from(["x", "y", None])) for _ in parts]
    by_byte = [author for part, author in zip(parts, authors, strict=True) for _ in part]
    expected, start = [], 0
    for char in text:
        among = set(by_byte[start : start + len(char.encode())])
        expected.append((char, among.pop() if len(among) == 1 else None))
        start += len(char.encode())
    who, found, sent, done = Authors(Bytes(parts)), [], 0, 0
    while done < len(parts):
        end = min(len(parts), done + data.draw(st.integers(1, 4)))
        certain = len(b"".join(parts[:end]).decode(errors="ignore"))
        told = text[sent : data.draw(st.integers(sent, certain)) if end < len(parts) else None]
        pieces = who.pieces(Chunk(told, list(range(done, end)), authors[done:end], None))
        assert "".join(piece.text for piece in pieces) == told
        found += [(char, piece.drafter) for piece in pieces for char in piece.text]
        sent, done = sent + len(told), end
    assert found == expected


def test_an_unfinished_character_at_the_end_has_an_author_too(llms: dict[str, LLM]) -> None:
    llm = llms["itself"]
    lead = llm.tokenizer.convert_tokens_to_ids("Ã")
    who = Authors(llm.tokenizer)
    chunks = list(llm.stream("abc", SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[lead])))
    pieces = [piece for chunk in chunks for piece in who.pieces(chunk)]
    assert "".join(piece.text for piece in pieces) == "\ufffd" * 3


@pytest.mark.parametrize("draft", ["off", "itself", "both"])
def test_pieces_of_real_streams_add_up_to_their_text(llms: dict[str, LLM], whole: Any, draft: str) -> None:
    """Each token of this tokenizer is a byte, so that ASCII characters have the author of their token."""
    llm, (params, outputs) = llms[draft], whole
    guessed = 0
    for prompt, plain in zip(PROMPTS, outputs, strict=True):
        for stop in [None, *some_stops(plain.text, 2, 3)]:
            stream, who = llm.stream(prompt, replace(params, stop=[stop] if stop else [])), Authors(llm.tokenizer)
            found: list[tuple[str, str | None]] = []
            drafters: list[str | None] = []
            for chunk in stream:
                drafters += chunk.drafters
                pieces = who.pieces(chunk)
                assert "".join(piece.text for piece in pieces) == chunk.text
                found += [(char, piece.drafter) for piece in pieces for char in piece.text if char.isascii()]
            texts = [decode(llm.tokenizer, [token]) for token in stream.token_ids]
            named = [(text, name) for text, name in zip(texts, drafters, strict=True) if text and text.isascii()]
            assert found == named[: len(found)]
            guessed += sum(name is not None for _, name in found)
    assert (guessed > 0) == (draft != "off")
