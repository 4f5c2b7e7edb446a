import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from bozza.text import Detokenizer, OutputText, decode

SAMPLES = ["plain words", "客单价 naïve 🙂🙃 ½", "👩‍👩‍👧‍👦 family", "tab\tnew\nline  two spaces", ""]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_report_103_deltas_add_up_whatever_the_blocks(smollm2, text, size):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == text == decode(tokenizer, ids)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_ids_in_any_blocks_stream_to_their_decoding(byte_tokenizer, data):
    """Also bytes that are no text: what stays unfinished comes at the end."""
    ids = data.draw(st.lists(st.integers(0, 210), max_size=40))
    detokenizer, streamed, rest = Detokenizer(byte_tokenizer), "", list(ids)
    while rest:
        size = data.draw(st.integers(1, 6))
        streamed += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert streamed + detokenizer.flush() == decode(byte_tokenizer, ids)


@pytest.fixture(scope="module")
def metaspace():
    """Words that carry their space in front, the first of which loses it, as SentencePiece models have it."""
    words = ["▁Hello", "▁world", "lo", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_spaces_survive_special_tokens_whatever_the_blocks(metaspace, data):
    whole = st.sampled_from([[1], [2], [3], [4], [5], *([6 + byte for byte in char.encode()] for char in "aé世🙂")])
    ids = [token for tokens in data.draw(st.lists(whole, max_size=9)) for token in tokens]
    detokenizer, streamed, rest = Detokenizer(metaspace), "", list(ids)
    while rest:
        size = data.draw(st.integers(1, 4))
        streamed += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert streamed + detokenizer.flush() == decode(metaspace, ids)


def test_special_tokens_are_not_shown(byte_tokenizer):
    ids = [*byte_tokenizer("ab")["input_ids"], 2]
    assert decode(byte_tokenizer, ids) == "ab"


class Pieces:
    """A tokenizer of which only decoding is there: token i is the bytes `pieces[i]`."""

    def __init__(self, pieces):
        self.pieces = list(pieces)
        self.ids = list(range(len(self.pieces)))

    def decode(self, ids, **_):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def cuts(text):
    """Every way to cut a text into tokens, those inside characters too; what splits a character holds nothing else."""
    units = [[char.encode()] if len(char.encode()) == 1 else [char.encode(), None] for char in text]
    for split in itertools.product((False, True), repeat=sum(len(unit) > 1 for unit in units)):
        apart = iter(split)
        parts = []  # (bytes, whether it may be joined to the next)
        for whole, *more in units:
            if more and next(apart):
                parts += [(bytes([byte]), False) for byte in whole]
            else:
                parts.append((whole, True))
        joints = [i for i in range(len(parts) - 1) if parts[i][1] and parts[i + 1][1]]
        for joined in itertools.product((False, True), repeat=len(joints)):
            pieces = [parts[0][0]]
            glue = dict(zip(joints, joined, strict=True))
            for i, (part, _) in enumerate(parts[1:]):
                if glue.get(i):
                    pieces[-1] += part
                else:
                    pieces.append(part)
            yield pieces


def expected(tokenizer, stops, least=0):
    """(tokens, text) of an output that ends at its first stop string, found by looking at everything each time."""
    for count in range(max(1, least), len(tokenizer.ids) + 1):
        before = tokenizer.decode(tokenizer.ids[: count - 1]).rstrip("\ufffd")
        text = tokenizer.decode(tokenizer.ids[:count])
        found = [
            start
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if found:
            return count, text[: min(found)]
    return len(tokenizer.ids), tokenizer.decode(tokenizer.ids)


def read(tokenizer, stops, least=0, takes=lambda: True):
    """(tokens, text) of an output, and the pieces that were handed out on the way."""
    output, handed, count = OutputText(tokenizer, stops, least), [], 0
    for token in tokenizer.ids:
        count += 1
        if output.push(token):
            break
        if takes():
            handed.append(output.take(False))
    handed.append(output.take(True))
    return (count, output.finish()), handed


@pytest.mark.parametrize(
    "stops",
    [["END"], ["é"], ["aé"], ["D!"], ["E", "ND"], ["ND", "END"], ["DN", "NDx"], ["!"], ["a"], ["éEND!"], ["nothing"]],
    ids=str,
)
@pytest.mark.parametrize("least", [0, 2, 4])
def test_report_7_a_stop_string_ends_the_text_wherever_tokens_part(stops, least):
    """Inside one token, over several, beside split characters: every way to cut the text into tokens."""
    ways = 0
    for pieces in cuts("aéEND!D"):
        tokenizer = Pieces(pieces)
        result, handed = read(tokenizer, stops, least)
        assert result == expected(tokenizer, stops, least)
        assert "".join(handed) == result[1]
        assert "\ufffd" not in result[1]
        ways += 1
    assert ways == 64 + 16  # with é whole, and split


def test_a_text_without_the_stop_string_is_whole():
    for pieces in cuts("ab é 客🙂"):
        assert read(Pieces(pieces), ["END", "客 "])[0] == (len(pieces), "ab é 客🙂")


@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_any_output_ends_at_its_first_stop_string_and_streams_to_the_same(data):
    """Few letters, so that stop strings overlap themselves and each other."""
    pieces = data.draw(st.lists(st.text("abé", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=12))
    stops = data.draw(st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
    least = data.draw(st.integers(0, 6))
    tokenizer = Pieces(pieces)
    result, handed = read(tokenizer, stops, least, takes=lambda: data.draw(st.booleans()))
    assert result == expected(tokenizer, stops, least)
    assert "".join(handed) == result[1]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_bytes_that_are_no_text_stream_to_the_whole_text_too(byte_tokenizer, data):
    ids = data.draw(st.lists(st.sampled_from([2, 36, 37, 130, 170, 180, 190, 210]), max_size=12))
    stops = [
        decode(byte_tokenizer, part)
        for part in data.draw(st.lists(st.lists(st.sampled_from([36, 37, 170])), max_size=2))
    ]
    output, streamed = OutputText(byte_tokenizer, [stop for stop in stops if stop]), ""
    for token in ids:
        if output.push(token):
            break
        if data.draw(st.booleans()):
            streamed += output.take(False)
    assert streamed + output.take(True) == output.finish()
    assert not any(stop in output.finish() for stop in stops if stop and "\ufffd" not in stop)


def test_what_may_begin_a_stop_string_waits_until_it_is_none():
    output = OutputText(Pieces([b"x", b"E", b"N", b"E", b"ND", b"O"]), ["ENDED", "DONE"])
    handed = []
    for token in range(6):
        assert not output.push(token)
        handed.append(output.take(False))
    #                 x    E   EN  ENE  ENEND  ENENDO: all but the beginning of DONE
    assert handed == ["x", "", "", "EN", "", "EN"]
    assert output.take(True) == "DO"
    assert output.finish() == "xENENDO"


def test_without_stop_strings_nothing_waits_but_unfinished_characters():
    output = OutputText(Pieces([b"a", b"\xf0\x9f", b"\x99\x82", b"b"]))
    assert [(output.push(token), output.take(False)) for token in range(4)] == [
        (False, "a"),
        (False, ""),
        (False, "🙂"),
        (False, "b"),
    ]


@pytest.mark.parametrize("least", range(7))
def test_a_stop_string_that_was_complete_too_early_does_not_count(least):
    """The first ends with token 3, the second with token 5."""
    output = OutputText(Pieces([b"a", b"E", b"N", b"E", b"N", b"b"]), ["EN"], least)
    pushed = [output.push(token) for token in range(5)]
    ends = 3 if least <= 3 else 5
    assert pushed.index(True) + 1 == ends if least <= 5 else True not in pushed
    if ends == 5 and least <= 5:
        assert output.finish() == "aEN"


def test_finishing_twice_or_taking_after_the_end_adds_nothing():
    output = OutputText(Pieces([b"ab", b"\xf0\x9f"]), ["x"])
    output.push(0)
    output.push(1)
    assert output.take(True) == "ab\ufffd"
    assert output.take(True) == ""
    assert output.finish() == output.finish() == "ab\ufffd"


TIED = [b"see END", b" \xf0\x9f", b"\x99\x82"]  # as " 🙂" is written in the vocabularies of GPT-2, Llama 3 and SmolLM2


def test_a_stop_string_is_complete_though_its_last_token_begins_another_character():
    output = OutputText(Pieces(TIED), ["END "])
    assert [output.push(0), output.push(1)] == [False, True]
    assert output.finish() == "see "


def test_a_stop_string_before_an_unfinished_character_at_the_end_is_not_shown():
    """The output is at its last token: no other will come to complete the character."""
    output = OutputText(Pieces(TIED), ["END "])
    output.push(0)
    output.push(1)
    assert output.finish() == "see "
