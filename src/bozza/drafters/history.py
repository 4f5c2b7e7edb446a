"""Earlier outputs of this process, for drafter `suffix`. Only for those who ask for it: see "Shared history" in
docs/design.md for what it can leak.

What is kept is bounded: the least recently used output makes room for a new one. An output counts as used when it
enters, when it comes again, and when a draft is made from it.

With a file, outputs are kept from one run to the next. The file is written at most every `SAVE_EVERY` seconds, when a
request ends; by `save`; and when the history is dropped or the interpreter exits. A process that is killed loses what
came after the last of these, and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bozza.drafters.chains import LONGEST, Chains, Occurrence, Tokens, before
from bozza.drafters.history_file import check_file, read, write
from bozza.drafters.spec import DraftSpec
from bozza.errors import ConfigError

MAX_TOKENS = 1 << 18
BLOCK = 16  # places are given out by so many
SAVE_EVERY = 30.0  # seconds

_Owner: TypeAlias = "tuple[array[int], int, bytes]"  # an output, where the block begins in it, its key


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: array[int]
    blocks: list[int]  # token i has place i % BLOCK of block i // BLOCK


class SharedHistory:
    """Outputs that any request may copy from.

    Memory: 60 bytes per token of `max_tokens` when it is full if that is a power of two, otherwise up to 76: 4 for the
    token, 48 to 64 for the index (see `Chains`), of which 16 to 32 are taken at once, and the rest to find the way
    back from it. Each output adds about 400 bytes.

    Args:
        max_tokens: most tokens kept. An output takes a multiple of 16; of a longer one than fits, the end is kept.
        file: where outputs are kept from one run to the next; None: nowhere.
        identity: of the model and its vocabulary. A file with another identity is refused.
        clock: seconds, monotonic.

    Raises:
        ConfigError: `max_tokens` is too small, or the file cannot be used; the message says what to do.
    """

    def __init__(
        self,
        max_tokens: int = MAX_TOKENS,
        file: str | Path | None = None,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_tokens < BLOCK:
            raise ConfigError(f"a history of {max_tokens} tokens is of no use: use at least {BLOCK}")
        self._capacity = max_tokens // BLOCK  # blocks
        self._chains = Chains(max_tokens, removable=True)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used one first
        self._owners: list[_Owner | None] = []  # of each block
        self._free: list[int] = []
        self._saver: _Saver | None = None
        if file is not None:
            path = _resolved(file)
            check_file(path)
            for tokens in read(path, identity):
                self.add(tokens)
            self._saver = _Saver(path, identity, self._entries, clock)
            # Not a method of this object, which would keep it alive. Runs at exit too.
            weakref.finalize(self, self._saver.save_quietly)

    def __len__(self) -> int:
        """Tokens kept."""
        return sum(len(entry.tokens) for entry in self._entries.values())

    def add(self, output: Sequence[int]) -> None:
        """Keep an output. One that is kept already counts as used; a single token says nothing."""
        if len(output) < 2:
            return
        tokens = array("i", output[-self._capacity * BLOCK :])
        key = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        if key in self._entries:
            self._entries.move_to_end(key)
        else:
            self._insert(key, tokens)
        if self._saver is not None:
            self._saver.changed()

    def find(self, text: Sequence[int], least: int = 1) -> list[Occurrence]:
        """Occurrences of the longest known end of a text, the latest first.

        Args:
            text: token ids.
            least: shorter matches than this are not wanted.
        """
        return self._chains.find(array("i", text[-LONGEST:]), self._where, least) if self._entries else []

    def use(self, occurrences: Iterable[Occurrence]) -> None:
        """Count the outputs that a draft is made from as used."""
        for occurrence in occurrences:
            if occurrence.entry is not None:
                self._entries.move_to_end(occurrence.entry)

    def save(self) -> None:
        """Write the file now, if there is one.

        Raises:
            ConfigError: it cannot be written.
        """
        if self._saver is not None:
            self._saver.save()

    def _insert(self, key: bytes, tokens: array[int]) -> None:
        needed = -(-len(tokens) // BLOCK)
        while self._capacity - len(self._owners) + len(self._free) < needed:
            self._evict()
        while len(self._free) < needed:
            self._free.append(len(self._owners))
            self._owners.append(None)
        self._chains.grow(len(self._owners) * BLOCK)
        entry = _Entry(tokens, [self._free.pop() for _ in range(needed)])
        for number, block in enumerate(entry.blocks):
            self._owners[block] = (tokens, number * BLOCK, key)
        for end in range(1, len(tokens)):
            self._chains.link(_place(entry, end), before(tokens, end))
        self._entries[key] = entry

    def _evict(self) -> None:
        """Forget the least recently used output."""
        _, entry = self._entries.popitem(last=False)
        for end in range(1, len(entry.tokens)):
            self._chains.unlink(_place(entry, end), before(entry.tokens, end))
        self._free += entry.blocks
        for block in entry.blocks:
            self._owners[block] = None

    def _where(self, place: int) -> tuple[Tokens, int, bytes | None]:
        owner = self._owners[place // BLOCK]
        if owner is None:
            raise RuntimeError(f"place {place} is linked, and belongs to no output")
        tokens, begin, key = owner
        return tokens, begin + place % BLOCK, key


def _place(entry: _Entry, end: int) -> int:
    return entry.blocks[end // BLOCK] * BLOCK + end % BLOCK


def check_sharing(shared: bool | str | Path, specs: Sequence[DraftSpec]) -> None:
    """Refuse a shared history (True, or a file for it) that makes no sense, before a model is loaded.

    Raises:
        ConfigError: no drafter would use it, or the file cannot be used.
    """
    if not isinstance(shared, (bool, str, Path)) or shared == "":
        raise ConfigError(f"shared_history={shared!r}: use True, False, or the name of a file")
    if shared is not False and all(spec.kind != "suffix" for spec in specs):
        raise ConfigError("only drafter 'suffix' uses a shared history: add it to the drafters, or do without")
    if not isinstance(shared, bool):
        check_file(_resolved(shared))


def open_sharing(shared: bool | str | Path, identity: Callable[[], str]) -> SharedHistory | None:
    """The history that was asked for, if any; `identity` is only asked when there is a file.

    Raises:
        ConfigError: the file cannot be used.
    """
    if isinstance(shared, bool):
        return SharedHistory() if shared else None
    return SharedHistory(file=shared, identity=identity())


def _resolved(file: str | Path) -> Path:
    return Path(file).expanduser().resolve()  # what a link points to is replaced, not the link


class _Saver:
    """Writes entries to a file now and then."""

    def __init__(
        self, file: Path, identity: str, entries: OrderedDict[bytes, _Entry], clock: Callable[[], float]
    ) -> None:
        self._file, self._identity, self._entries, self._clock = file, identity, entries, clock
        self._unsaved = False
        self._saved = clock()  # when it was tried last

    def changed(self) -> None:
        """Note that the file is behind, and write it if that was long ago."""
        self._unsaved = True
        if self._clock() - self._saved >= SAVE_EVERY:
            self.save_quietly()

    def save(self) -> None:
        """See `SharedHistory.save`."""
        self._saved = self._clock()
        try:
            write(self._file, self._identity, [entry.tokens for entry in self._entries.values()])
        except OSError as problem:
            raise ConfigError(
                f"history file {self._file} cannot be written ({problem.strerror}): make room, or name another file"
            ) from problem
        self._unsaved = False

    def save_quietly(self) -> None:
        """Write what is not yet written. A full disk must not end anybody's request, so a failure is only logged."""
        if self._unsaved:
            try:
                self.save()
            except ConfigError as problem:
                logging.getLogger("bozza").warning("%s", problem)
