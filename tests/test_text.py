import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.text import Detokenizer, decode

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


def test_special_tokens_are_not_shown(byte_tokenizer):
    ids = [*byte_tokenizer("ab")["input_ids"], 2]
    assert decode(byte_tokenizer, ids) == "ab"
