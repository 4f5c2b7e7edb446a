"""What the tokens of a tokenizer are as bytes, and whether two models mean the same thing by the same token id.

Two kinds of tokenizers have such a view. Byte-level ones (GPT-2, Llama 3, Qwen, SmolLM2) write each byte of a token as
one printable character. Those that come from SentencePiece (Llama 2, Gemma, Mistral) write text with "▁" for a space,
and single bytes as <0xNN>. Others, such as WordPiece, forget spaces or case and are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from bozza.errors import ModelError
from bozza.models.loading import Loaded

SPACE = "▁"
_RUNS = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")  # bytes that are no text, as `surrogateescape` shows them
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class NoByteView(Exception):  # noqa: N818 - it names the tokenizer's state
    """A tokenizer whose tokens are no bytes; says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model as bytes. Only ids that the model has are in it."""

    pieces: Mapping[int, bytes]  # tokens of ordinary text
    specials: Mapping[int, str]  # control tokens, by how they are written
    ids: Mapping[bytes, int]  # of the pieces; where several have the same bytes, the one that encoding uses
    roles: Mapping[str, int]  # "eos" and "bos", as far as there are any
    opening: tuple[int, ...]  # control tokens that the tokenizer puts before a text
    spaced: bool  # whether it puts a space before a text
    encoder: Tokenizer  # neither of these two, and no control token, comes from it

    def encode(self, data: bytes) -> list[int]:
        """Tokens of bytes that may begin and end anywhere; what is no text is written in the longest pieces."""
        ids: list[int] = []
        for run in _RUNS.findall(data.decode("utf-8", "surrogateescape")):
            if "\udc80" <= run[0] <= "\udcff":
                ids += self._in_pieces(run.encode("utf-8", "surrogateescape"))
            else:
                ids += self.encoder.encode(run, add_special_tokens=False).ids
        return ids

    def _in_pieces(self, data: bytes) -> list[int]:
        """The longest piece first, again and again; a byte that no piece begins with is left out."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            longest = next((end for end in range(len(data), start, -1) if data[start:end] in self.ids), None)
            if longest is not None:
                ids.append(self.ids[data[start:longest]])
            start = longest or start + 1
        return ids


def read_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """The byte view of a transformers tokenizer.

    Args:
        size: how many ids the model has.

    Raises:
        NoByteView: there is none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoByteView("is not one of the tokenizers library")
    description = json.loads(backend.to_str())
    added = {token["id"]: token for token in description["added_tokens"]}
    byte_level = _is_byte_level(description)
    plain = backend.get_vocab(with_added_tokens=False)
    known = [(id_, token) for token, id_ in plain.items() if id_ not in added and id_ < size]
    pieces = _byte_level_pieces(known) if byte_level else _sentencepiece_pieces(known)
    pieces |= {i: t["content"].encode() for i, t in added.items() if not t["special"] and i < size}
    specials = {i: t["content"] for i, t in added.items() if t["special"] and i < size}
    encoder, spaced = _plain_encoder(description)
    named = {"eos": getattr(tokenizer, "eos_token_id", None), "bos": getattr(tokenizer, "bos_token_id", None)}
    roles = {role: id_ for role, id_ in named.items() if id_ is not None and id_ in specials}
    return Vocabulary(
        pieces,
        specials,
        _ids_of(pieces, dict(known)),
        roles,
        _opening(tokenizer),
        spaced,
        encoder,
    )


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    """True for byte-level tokenizers, False for those of SentencePiece.

    Raises:
        NoByteView: it is neither.
    """
    model = description["model"]["type"]
    stages = [stage for part in ("normalizer", "pre_tokenizer", "decoder") for stage in _stages(description[part])]
    if model == "BPE" and any(stage["type"] == "ByteLevel" for stage in stages):
        return True
    marked = (stage for stage in stages if stage["type"] in ("Metaspace", "Replace"))
    if model in ("BPE", "Unigram") and any(SPACE in json.dumps(stage, ensure_ascii=False) for stage in marked):
        return False
    raise NoByteView(f"is a {model} that writes tokens neither byte by byte nor with {SPACE} for spaces")


def _stages(value: Any) -> Iterator[dict[str, Any]]:
    """A stage of a tokenizer, or those of a sequence."""
    if not value:
        return
    if value["type"] != "Sequence":
        yield value
    for name in ("normalizers", "pretokenizers", "decoders"):
        for stage in value.get(name, ()):
            yield from _stages(stage)


def byte_alphabet() -> dict[str, int]:
    """The bytes by the characters that byte-level tokenizers write them as (Radford et al., 2019, GPT-2's encoder).

    Printable characters of Latin-1 stand for themselves, the other bytes in order for U+0100, U+0101 and so on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level_pieces(known: list[tuple[int, str]]) -> dict[int, bytes]:
    alphabet = byte_alphabet()
    return {id_: bytes(alphabet[c] for c in token) for id_, token in known if token and alphabet.keys() >= set(token)}


def _sentencepiece_pieces(known: list[tuple[int, str]]) -> dict[int, bytes]:
    spelled = {id_: _BYTE.fullmatch(token) for id_, token in known}
    return {
        id_: bytes.fromhex(byte[1]) if (byte := spelled[id_]) else token.replace(SPACE, " ").encode()
        for id_, token in known
        if token
    }


def _ids_of(pieces: Mapping[int, bytes], known: Mapping[int, str]) -> dict[bytes, int]:
    """Ids by bytes. <0x41> yields to A: encoding uses it only where there is no A."""
    ids: dict[bytes, int] = {}
    for id_ in sorted(pieces, key=lambda id_: (_BYTE.fullmatch(known.get(id_, "")) is not None, id_)):
        ids.setdefault(pieces[id_], id_)
    return ids


def _plain_encoder(description: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """A copy of the tokenizer that adds nothing to a text, and whether the original puts a space before it."""
    spaced = False
    for stage in [*_stages(description["normalizer"]), *_stages(description["pre_tokenizer"])]:
        for option, off in (("prepend", ""), ("prepend_scheme", "never"), ("add_prefix_space", False)):
            if option in stage and stage[option] != off:
                stage[option], spaced = off, True
    description |= {"post_processor": None, "truncation": None, "padding": None}
    encoder = Tokenizer.from_str(json.dumps(description))
    encoder.encode_special_tokens = True  # a control token that is spelled out in a text is text
    return encoder, spaced


def _opening(tokenizer: Any) -> tuple[int, ...]:
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    found = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return tuple(whole[: next(found, 0)])


def foreign_token(draft: Loaded, target: Loaded) -> tuple[int, str] | None:
    """The first token of the target whose id means something else to the draft model; None when it can be fed as it is.

    Embeddings may be padded to different sizes. Models without tokenizers are taken at their word: a wrong guess costs
    time, never correctness.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        return None
    drafts, targets = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if drafts == targets:
        return None
    size = size_of(draft)
    differ = ((id_, token) for token, id_ in targets.items() if drafts.get(token) != id_ and id_ < size)
    return min(differ, default=None)


def size_of(loaded: Loaded) -> int:
    """How many ids a model has, padding included."""
    size: int = loaded.model.config.get_text_config(decoder=True).vocab_size
    return size


def vocabularies(name: str, draft: Loaded, target: Loaded) -> tuple[Vocabulary, Vocabulary] | None:
    """The byte views of the draft model and the target; None when they have the same tokens and need none.

    Raises:
        ModelError: the tokens differ, and one of the tokenizers has no byte view.
    """
    foreign = foreign_token(draft, target)
    if foreign is None:
        return None
    views = []
    for owner, loaded in ((name, draft), ("the target", target)):
        try:
            views.append(read_vocabulary(loaded.tokenizer, size_of(loaded)))
        except NoByteView as problem:
            raise ModelError(
                f"{name} has another vocabulary than the target (token {foreign[0]} is {foreign[1]!r} in the target "
                f"only), and they cannot be translated: the tokenizer of {owner} {problem}; "
                "draft with a model of the same family"
            ) from problem
    return views[0], views[1]
