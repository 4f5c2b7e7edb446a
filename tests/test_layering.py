"""The leader and the free drafters run where torch is not: inside other engines, and in replays."""

import subprocess
import sys
import tomllib
from pathlib import Path

import bozza

ROOT = Path(__file__).parent.parent
FREE = ["bozza", "bozza.core", "bozza.params", "bozza.theory", "bozza.leader", "bozza.drafters", "bozza.drafters.spec"]
FREE += ["bozza.drafters.grammar", "bozza.drafters.prediction", "bozza.drafters.suffix"]
FREE += ["bozza.study.traces", "bozza.study.guesses", "bozza.study.oracle", "bozza.study.replay"]


def test_free_modules_import_neither_torch_nor_transformers():
    code = f"import sys, {', '.join(FREE)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_engine_knows_no_text():
    for file in (ROOT / "src/bozza/engine").glob("*.py"):
        source = file.read_text()
        assert "tokenizer" not in source
        assert "bozza.text" not in source


def test_files_stay_readable():
    long = {f.name: n for f in (ROOT / "src").rglob("*.py") if (n := len(f.read_text().splitlines())) > 400}
    assert not long


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == bozza.__version__
    assert f"## {bozza.__version__}" in (ROOT / "CHANGELOG.md").read_text()
