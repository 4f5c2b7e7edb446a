"""Environments of the peers, and models in their formats, made by `run.py --setup`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bozza.models import catalog

VLLM = Path(__file__).parent.parent / "vllm" / "run.py"  # makes vLLM's environment
LLAMA = "llama-cpp-python==0.3.36"
# What the processor can do is named, not found out: a native build has AMX, which crashes at the first product.
SWITCHES = {
    "GGML_NATIVE": "OFF",
    "GGML_AVX": "ON",
    "GGML_AVX2": "ON",
    "GGML_FMA": "ON",
    "GGML_F16C": "ON",
    "GGML_BMI2": "ON",
    "GGML_AVX512": "ON",
    "GGML_AVX512_VBMI": "ON",
    "GGML_AVX512_VNNI": "ON",
    "GGML_AVX512_BF16": "ON",
    "GGML_AMX_TILE": "OFF",
    "GGML_AMX_INT8": "OFF",
    "GGML_AMX_BF16": "OFF",
    "LLAVA_BUILD": "OFF",
}
OPENVINO = ["openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel[nncf]==2.2.0", "torch==2.13.0"]
FORMATS = ("int8", "int4")
EXPORT = ["--task", "text-generation-with-past"]


def root() -> Path:
    """Where everything of the peers is kept."""
    return catalog.cache_folder() / "peers"


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    if peer in ("bozza", "transformers"):
        return Path(sys.executable)
    folder = catalog.cache_folder() / "vllm" / "environment" if peer == "vllm" else root() / peer
    return folder / "bin" / "python"


def is_ready(peer: str) -> bool:
    """True once a peer's environment is complete."""
    return peer in ("bozza", "transformers") or (python_of(peer).parent.parent / ".ready").exists()


def variables(peer: str, threads: int) -> dict[str, str]:
    """What every worker of a peer has in its environment."""
    found = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    library = python_of(peer).parent.parent / "lib" / "libiomp5.so"
    if peer == "vllm" and library.exists():  # without it speculation is much slower
        found["LD_PRELOAD"] = os.pathsep.join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    return found


def exports(model: Path) -> dict[str, Path]:
    """Folders of OpenVINO's forms of a model, made or not."""
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(model.glob("*.safetensors"))]
    key = hashlib.sha256(f"{model.resolve()}:{state}".encode()).hexdigest()[:12]
    return {form: root() / "models" / f"{model.name}-{key}-{form}" for form in FORMATS}


def make(peer: str, model: Path) -> None:
    """Make what is missing of a peer.

    Raises:
        subprocess.CalledProcessError: a command failed; it said why.
    """
    if peer == "vllm":
        run([sys.executable, str(VLLM), "--setup"])
    elif peer == "llama.cpp":
        flags = " ".join(f"-D{name}={value}" for name, value in SWITCHES.items())
        build = {"CMAKE_ARGS": flags, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
        install(peer, ["--no-binary", "llama-cpp-python", LLAMA], build)
    elif peer == "openvino":
        install(peer, OPENVINO, unwanted=["torchvision"])  # does not go with this torch, and nobody needs it
        for form, folder in exports(model).items():
            export(model, form, folder)


def install(
    peer: str, what: Sequence[str], build: Mapping[str, str] | None = None, unwanted: Sequence[str] = ()
) -> None:
    """A virtual environment with packages, made once."""
    if is_ready(peer):
        return
    python = python_of(peer)
    folder = python.parent.parent
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", *what], build)
    if unwanted:
        run([*pip, "uninstall", "--quiet", "--yes", *unwanted])
    (folder / ".ready").touch()


def export(model: Path, form: str, folder: Path) -> None:
    """OpenVINO's form of a model, made once."""
    if (folder / ".ready").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    tool = python_of("openvino").parent / "optimum-cli"
    command = [str(tool), "export", "openvino", "--model", str(model), *EXPORT, "--weight-format", form, str(folder)]
    run(command, {"HF_HUB_OFFLINE": "1"})
    (folder / ".ready").touch()


def run(command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    """Run a command and show it."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | dict(more or {}))
