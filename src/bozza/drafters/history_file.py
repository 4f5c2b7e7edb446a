"""One file that holds a history: a line of JSON that says whose it is, the outputs, a checksum.

It is replaced as a whole (a new file beside it is renamed), so a crash leaves the old one or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bozza.errors import ConfigError

FORMAT, VERSION = "bozza-history", 1
_DIGEST = 32  # bytes
_LONGEST_HEADER = 4096  # bytes


def check_file(file: Path) -> None:
    """Refuse a path that a history could not be kept at. Cheap, so that it can come before a model is loaded.

    Raises:
        ConfigError: its folder does not exist or cannot be written to, or something else than a history is there.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"history file {file}: there is no folder {file.parent}, make it or name another file")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"history file {file}: this cannot be written, name a file in a folder of yours")
    if file.exists():
        with _readable(file), file.open("rb") as stream:
            _header(file, stream.readline(_LONGEST_HEADER))


def read(file: Path, identity: str) -> list[array[int]]:
    """The outputs in a file, in the order in which they were written; none when there is no file.

    Raises:
        ConfigError: it cannot be read, is damaged, or belongs to another model or version.
    """
    if not file.exists():
        return []
    with _readable(file):
        data = file.read_bytes()
    line, _, rest = data.partition(b"\n")
    header = _header(file, line)
    if header.get("identity") != identity:
        raise ConfigError(
            f"history file {file} belongs to another model ({header.get('identity')}, this one is {identity}): "
            "name another file, or delete it"
        )
    if hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise ConfigError(f"history file {file} is damaged: delete it, and a new one will be made")
    numbers = _numbers(rest[:-_DIGEST])
    entries, place = [], 0
    while place < len(numbers):
        entries.append(numbers[place + 1 : place + 1 + numbers[place]])
        place += 1 + numbers[place]
    return entries


def write(file: Path, identity: str, entries: Iterable[array[int]]) -> None:
    """Replace the file. It is readable by its owner only.

    Raises:
        OSError: the new file cannot be written; the old one is then as it was.
    """
    header = json.dumps({"format": FORMAT, "version": VERSION, "identity": identity})
    numbers = array("i")
    for entry in entries:
        numbers.append(len(entry))
        numbers += entry
    data = header.encode() + b"\n" + _little_endian(numbers).tobytes()
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data + hashlib.blake2b(data, digest_size=_DIGEST).digest())
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _header(file: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:  # not JSON, or not even text
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"{file} is no history file: it stays as it is, name another file")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"history file {file} has format {header.get('version')}, this version reads {VERSION}: "
            "name another file, or delete it"
        )
    return header


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turns what the system says about a file into a line for the user."""
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"history file {file} cannot be read ({problem.strerror}): name another file") from problem


def _numbers(data: bytes) -> array[int]:
    numbers = array("i")
    numbers.frombytes(data)
    return _little_endian(numbers)


def _little_endian(numbers: array[int]) -> array[int]:
    """Between the machine's order and the file's."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers
