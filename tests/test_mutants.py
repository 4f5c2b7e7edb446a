"""Would the tests notice? Each mutant is one wrong line in a copy of the sources, and some test must fail on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    tests: str  # where it must be noticed: a file, or one test of a file that takes long


MUTANTS = [
    Mutant(
        "the noise of a node is that of the root",
        "sampling/processors.py",
        "return self.request.output_len + len(self.path)",
        "return self.request.output_len",
        "tests/rules/test_coupled.py",
    ),
    Mutant(
        "a walk takes a node of another branch",
        "rules/coupled.py",
        "self._children.get((self._node, token))",
        "max((n for (p, t), n in self._children.items() if t == token and n > self._node), default=None)",
        "tests/rules/test_coupled.py",
    ),
    Mutant(
        "the acceptance ratio is upside down",
        "rules/rejection.py",
        "float(law[token]) / float(proposal[token])",
        "float(proposal[token]) / max(float(law[token]), 1e-300)",
        "tests/rules/test_laws.py::test_report_49_chains_leave_the_law_as_it_is",
    ),
    Mutant(
        "after a rejection the target's law is used as it was",
        "rules/rejection.py",
        "left = (law - proposal).clamp_(min=0.0)",
        "left = law.clone()",
        "tests/rules/test_laws.py::test_report_49_chains_leave_the_law_as_it_is",
    ),
    Mutant(
        "a second child is taken to be drawn with replacement",
        "rules/rejection.py",
        "proposal[list(before)] = 0.0",
        "pass",
        "tests/rules/test_laws.py::test_report_58_trees_leave_the_law_as_it_is",
    ),
    Mutant(
        "block verification forgets to condition on what was not accepted later",
        "rules/block.py",
        "return surplus / (surplus + (1.0 - share)) if surplus > 0.0 else 0.0",
        "return surplus",
        "tests/rules/test_laws.py::test_report_49_chains_leave_the_law_as_it_is",
    ),
    Mutant(
        "block verification does not carry p over to the residual",
        "rules/block.py",
        "left = (carried * law - ",
        "left = (law - ",
        "tests/rules/test_laws.py::test_report_49_chains_leave_the_law_as_it_is",
    ),
    Mutant(
        "drafts that happened to agree are taken for one chain",
        "rules/block.py",
        "chain = not draft.merged and ",
        "chain = ",
        "tests/rules/test_laws.py::test_block_does_not_take_two_drafts_that_met_for_a_chain",
    ),
    Mutant(
        "drafting and acceptance share their numbers",
        "sampling/chance.py",
        'f"{request.seed}:{stream}:{request.stats.passes}"',
        'f"{request.seed}:{request.stats.passes}"',
        "tests/sampling/test_chance.py",
    ),
    Mutant(
        "two drafters share their numbers",
        "drafters/model.py",
        'Coins(request, f"draft {self.name}")',
        'Coins(request, "draft")',
        "tests/drafters/test_model_drafter.py::test_two_drafters_draw_independently_of_each_other_and_say_from_what",
    ),
    Mutant(
        "how deep a merged sampled draft goes depends on what was drawn",
        "drafters/merge.py",
        "(_together(drafts, depth) if sampled else len(union))",
        "len(union)",
        "tests/rules/test_laws.py::test_negative_control_a_cut_that_depends_on_what_was_drawn_is_noticed",
    ),
    Mutant(
        "tokens after a stop in the same block leak out",
        "engine/stops.py",
        'return tokens[:count], "stop"',
        'return tokens, "stop"',
        "tests/engine/test_stops.py",
    ),
    Mutant(
        "the limit hides a stop at the same token",
        "engine/stops.py",
        "if token in request.end_ids or any(ended):",
        "if count < request.remaining and (token in request.end_ids or any(ended)):",
        "tests/engine/test_stops.py",
    ),
    Mutant(
        "the store counts the target's own token as read",
        "engine/loop.py",
        "request.cached += len(path)",
        "request.cached += len(tokens)",
        "tests/engine/test_loop.py",
    ),
    Mutant(
        "the store is not told which branch stood",
        "engine/loop.py",
        "self.model.keep(row.slot, request.cached, path)",
        "self.model.keep(row.slot, request.cached, range(len(path)))",
        "tests/engine/test_loop.py",
    ),
    Mutant(
        "log-probabilities are read one row too far",
        "engine/loop.py",
        "rows = logits[[node + 1 for node in standing]]",
        "rows = logits[[min(node + 2, len(logits) - 1) for node in standing]]",
        "tests/engine/test_loop.py",
    ),
    Mutant(
        "drafters are shown the first nodes instead of those that stood",
        "engine/readings.py",
        "len(row.tokens) + node for node in path]",
        "len(row.tokens) + node for node in range(len(path))]",
        "tests/engine/test_readings.py",
    ),
    Mutant(
        "all nodes of a grown tree race as the root does",
        "drafters/tree.py",
        "(place.request.seed, place.position)",
        "(place.request.seed, place.request.output_len)",
        "tests/drafters/test_tree.py",
    ),
    Mutant(
        "laws after tokens that did not stand replace better ones",
        "drafters/recycling.py",
        "*(node + 1 for node in reading.path)",
        "*reading.path",
        "tests/drafters/test_recycling.py",
    ),
    Mutant(
        "training lets a head see what the target has not read",
        "train/unrolled.py",
        "<= slot - step]",
        "<= slot]",
        "tests/train/test_unrolled.py",
    ),
    Mutant(
        "a head adds to the normed state where it should add to the state",
        "models/eagle.py",
        "residual = normed if self.norm_before_residual else hidden",
        "residual = normed",
        "tests/models/test_eagle_head.py",
    ),
    Mutant(
        "a resumed epoch begins again",
        "train/loop.py",
        "self._epoch(epoch)[place:]",
        "self._epoch(epoch)",
        "tests/train/test_train_loop.py",
    ),
    Mutant(
        "what is verified beside drawn tokens depends on them",
        "leader/adaptive.py",
        "before[id_] = sorted(state.kept)",
        "before[id_] = [n for n in sorted(state.kept) if beliefs[id_].tokens[n] not in draft.tokens]",
        "tests/leader/test_adaptive.py",
    ),
    Mutant(
        "a step that stalls counts in full",
        "leader/cost.py",
        "off = max(-CLIP, min(CLIP, math.log(seconds / expected)))",
        "off = math.log(seconds / expected)",
        "tests/leader/test_cost.py",
    ),
    Mutant(
        "a layer is given the part of another input",
        "models/sharing.py",
        "if index == 0 or held is None or held[0] is not x:",
        "if index == 0 or held is None:",
        "tests/models/test_sharing.py",
    ),
    Mutant(
        "layers are one although their input is changed between them",
        "models/sharing.py",
        " and torch.equal(content, now)",
        "",
        "tests/models/test_sharing.py",
    ),
    Mutant(
        "zero is off by one in rows of int8",
        "models/products.py",
        ".add_(ZERO + 0.5)",
        ".add_(ZERO + 1.5)",
        "tests/models/test_products.py",
    ),
    Mutant(
        "rows of int8 have the scale of their batch",
        "models/products.py",
        "x.abs().amax(dim=-1, keepdim=True)",
        "x.abs().amax().expand(*x.shape[:-1], 1)",
        "tests/models/test_products.py",
    ),
    Mutant(
        "old weights are held while new ones are made",
        "models/packing.py",
        "    for group in groups:\n        layers: list[Any] = [",
        "    every = dict(module.named_modules())\n    for group in groups:\n        layers: list[Any] = [",
        "tests/models/test_packing.py::test_two_copies_are_never_held",
    ),
]


class Run(NamedTuple):
    status: int
    output: str


class Nursery:
    """The process that runs tests against copies of the sources, see `nursery.py`."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # there must be no threads where it forks
        command = [sys.executable, str(ROOT / "tests" / "nursery.py")]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, source: Path, tests: Sequence[str]) -> Run:
        log = source.parent / "log"
        asked = {"source": str(source), "tests": tests, "log": str(log), "seconds": 180}
        wire = self._process
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.write(json.dumps(asked) + "\n")
        wire.stdin.flush()
        status = int(wire.stdout.readline())
        return Run(status, log.read_text(encoding="utf-8"))

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the sources, to import in place of the installed ones."""
    shutil.copytree(ROOT / "src" / "bozza", tmp_path / "src" / "bozza", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "src"


def test_the_copy_itself_passes(nursery: Nursery, source: Path):
    """Otherwise mutants could be noticed for the wrong reason."""
    run = nursery.run(source, sorted({mutant.tests for mutant in MUTANTS}))
    assert run.status == 0, run.output[-2000:]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_noticed(nursery: Nursery, source: Path, mutant: Mutant):
    file = source / "bozza" / mutant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.right) == 1, "the line has changed: change the mutant with it"
    file.write_text(text.replace(mutant.right, mutant.wrong), encoding="utf-8")
    run = nursery.run(source, [mutant.tests])
    assert run.status == 1, run.output[-2000:]  # failed tests, not a file that could not be run
    assert " FAILURES " in run.output
