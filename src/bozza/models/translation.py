"""From the tokens of a target to those of a draft model with another tokenizer, and back, through bytes.

Reading and writing text in the other's tokens is what SLEM does, keeping to the tokens that both have is TLI (both:
Timor et al., 2025, accelerating decoding with heterogeneous vocabularies). Nothing here can make an output wrong: a
context that is tokenised a little differently than the draft model would like makes a worse guess, and costs time.
"""

from __future__ import annotations

from collections.abc import Sequence

from bozza.models.vocabulary import Vocabulary

LOOSE = 256  # target tokens that may stay unsettled where no word ends
LEFT = 64  # of these, how many stay unsettled when the others are settled by force
WHITE = b" \t\r\n"


class Translation:
    """What the tokens of two vocabularies have to do with each other.

    Attributes:
        shared: target id -> draft id, for tokens of the same bytes and for control tokens of the same meaning.
        share: of the draft model's tokens, the part that the target has too.
    """

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.draft = draft
        self.target = target
        self._specials = _same_specials(draft, target)
        pieces = {id_: draft.ids[piece] for piece, id_ in target.ids.items() if piece in draft.ids}
        self.shared = pieces | self._specials
        self.share = len(set(self.shared.values())) / max(1, len(draft.pieces) + len(draft.specials))

    def special(self, token: int) -> int | None:
        """The draft model's control token for one of the target's; None when it has none."""
        return self._specials.get(token)


def _same_specials(draft: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Control tokens that are written alike, then those that end and begin texts in both."""
    by_text = {text: id_ for id_, text in draft.specials.items()}
    same = {id_: by_text[text] for id_, text in target.specials.items() if text in by_text}
    for role, id_ in target.roles.items():
        other = draft.roles.get(role)
        if other is not None and id_ not in same and other not in same.values():
            same[id_] = other
    return same


class Transcript:
    """One request in the draft model's tokens, kept up as it grows.

    Tokens are settled up to a place that no later text can change: behind a control token, or before a space and a
    letter, where the words of all usual tokenizers begin. Only what comes behind it is tokenised again.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._settled: list[int] = []
        self._done = 0  # tokens of the request that the settled ones stand for
        self._begun = False

    def follow(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The request's tokens in the draft model's, and how many of these will never change."""
        if not self._begun:
            self._open(tokens)
            self._begun = True
        data = bytearray()  # the text since the last control token
        ends: list[int] = []  # where in it each token ends
        for place in range(self._done, len(tokens)):
            token = tokens[place]
            if token in self._translation.target.specials:
                self._settle(bytes(data), place)
                data, ends = bytearray(), []
                self._control(token, place)
            else:
                data += self._translation.target.pieces.get(token, b"")
                ends.append(len(data))
        if count := _safe(data, ends):
            self._settle(bytes(data[: ends[count - 1]]), self._done + count)
            del data[: ends[count - 1]]
        return self._settled + self._encode(bytes(data)), len(self._settled)

    def _open(self, tokens: Sequence[int]) -> None:
        """What the draft model's tokenizer puts before a text, in the place of what the target's does."""
        draft, target = self._translation.draft, self._translation.target
        if target.opening and tuple(tokens[: len(target.opening)]) == target.opening:
            self._done = len(target.opening)
        first = self._translation.special(tokens[self._done]) if self._done < len(tokens) else None
        if draft.opening and draft.opening[0] != first:
            self._settled += draft.opening

    def _settle(self, data: bytes, done: int) -> None:
        self._settled += self._encode(data)
        self._done = done

    def _control(self, token: int, place: int) -> None:
        """A control token: the draft model's own, or else as text."""
        special = self._translation.special(token)
        text = self._translation.target.specials[token]
        self._settled += [special] if special is not None else self._translation.draft.encode(text.encode())
        self._done = place + 1

    def _encode(self, data: bytes) -> list[int]:
        draft, target = self._translation.draft, self._translation.target
        if data and len(self._settled) <= len(draft.opening):  # the beginning of a text
            if target.spaced and data.startswith(b" "):
                data = data[1:]
            if draft.spaced:
                data = b" " + data
        return draft.encode(data)


def _safe(data: bytearray, ends: Sequence[int]) -> int:
    """How many leading tokens of a text can be settled. `ends` says where in data each token ends."""
    for count in range(len(ends) - 1, 0, -1):
        end = ends[count - 1]
        if data[end : end + 1] == b" " and data[end + 1 : end + 2].isalpha() and data[end - 1 : end] not in WHITE:
            return count
    if len(ends) <= LOOSE:
        return 0
    # Text without spaces: any place between characters will do, its tokens are at worst unusual.
    for count in range(len(ends) - LEFT, 0, -1):
        follows = data[ends[count - 1] : ends[count - 1] + 1]
        if follows and follows[0] & 0xC0 != 0x80:
            return count
    return 0
