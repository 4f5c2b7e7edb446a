import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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
