"""What a person sees of drafters and leader: `--show`, `--trace`."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM, SamplingParams
from bozza.cli import show
from bozza.core import RequestStats
from bozza.stream import Piece

GREEN, CYAN, END = "\x1b[32m", "\x1b[36m", "\x1b[0m"
ITSELF = ("--policy", "fixed", "-n", 24, "--draft", "ngram:k=2", "--draft")


class Terminal(io.StringIO):
    """Standard output that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes standard output a terminal with colours, from this call on: pytest sets it when a test begins."""

    def make() -> Terminal:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        made = Terminal()
        monkeypatch.setattr(sys, "stdout", made)
        return made

    return make


Screen = Callable[[], Terminal]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def bozza(bozza: Callable[..., tuple[int, str, str]]) -> Run:
    """Runs a command; returns exit code and standard error in one line."""

    def run(*arguments: object) -> tuple[int, str]:
        code, _, err = bozza(*arguments)
        return code, " ".join(err.split())

    return run


def untinted(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_on_a_terminal_each_drafter_has_its_colour(
    terminal: Screen, bozza: Run, folders: dict[str, Path], command: str
) -> None:
    screen = terminal()
    code, err = bozza(command, "abab", "-m", folders["target"], *ITSELF, f"model:{folders['target']}", "--show")
    llm, params = LLM(folders["target"], policy="off"), SamplingParams(max_tokens=24)
    answer = llm.generate("abab", params)[0] if command == "generate" else llm.chat([_turn("abab")], params)
    shown = screen.getvalue()
    assert code == 0
    assert untinted(shown) == answer.text.translate(show.PICTURES) + "\n"
    assert CYAN in shown  # the second drafter, which is always right
    assert shown.count(END) == shown.count(GREEN) + shown.count(CYAN)
    counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+) \(\d+%\)", err)}
    assert sum(counts.values()) == len(answer.token_ids)
    assert counts["model"] > counts["target"]
    for part in ("tokens/s", "chosen", " passes per pass got ", " time plan ", "verify"):
        assert part in err


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("reason", ["pipe", "NO_COLOR", "dumb"])
def test_without_colours_the_text_is_plain_and_counts_are_there(
    terminal: Screen, bozza: Run, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    printed: io.StringIO = terminal()
    if reason == "pipe":
        printed = io.StringIO()
        monkeypatch.setattr(sys, "stdout", printed)
    else:
        monkeypatch.setenv("NO_COLOR" if reason == "NO_COLOR" else "TERM", "dumb")
    code, err = bozza("generate", "abab", "-m", folders["target"], *ITSELF, f"model:{folders['target']}", "--show")
    assert code == 0
    assert "\x1b" not in printed.getvalue()
    assert re.search(r"tokens .*model \d+ \(\d+%\) · target \d+ \(\d+%\)", err)


def test_without_show_nothing_is_tinted_and_nothing_is_added(
    terminal: Screen, bozza: Run, folders: dict[str, Path]
) -> None:
    screen = terminal()
    _, err = bozza("generate", "abab", "-m", folders["target"], *ITSELF, f"model:{folders['target']}")
    assert "\x1b[3" not in screen.getvalue()
    assert "chosen" not in err
    assert "target" not in err


def test_a_stop_string_and_its_beginning_are_not_shown(terminal: Screen, bozza: Run, folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=24)
    whole = LLM(folders["target"], policy="off").generate("abab", params)[0].text
    stop = re.findall(r"[!-~]{2}", whole)[-1]
    screen = terminal()
    bozza("generate", "abab", "-m", folders["target"], *ITSELF, f"model:{folders['target']}", "--show", "--stop", stop)
    assert untinted(screen.getvalue()) == whole[: whole.index(stop)].translate(show.PICTURES) + "\n"


def test_text_is_neither_markup_nor_a_command_to_the_terminal(terminal: Screen) -> None:
    text = "[red]\\[b]\x1b[2J\x07\r\x9b1m\x7f\ttab\nline é🙂"
    screen = terminal()
    show.Painter(["a"]).write([Piece(text, "a"), Piece(text, None)])
    safe = "[red]\\[b]␛[2J␇␍\ufffd1m␡\ttab\nline é🙂"
    assert screen.getvalue() == f"{GREEN}{safe}{END}{safe}"


def test_colours_go_by_the_order_of_the_drafters(terminal: Screen) -> None:
    names = [f"d{i}" for i in range(len(show.TINTS))]
    screen = terminal()
    for name in names:
        show.Painter(names).write([Piece("x", name)])
    codes = re.findall(r"\x1b\[(\d+)mx\x1b\[0m", screen.getvalue())
    assert codes[:2] == ["32", "36"]
    assert len(set(codes)) == len(names)
    show.Painter([*names, "further"]).write([Piece("y", "further")])  # there are no more: they begin again
    assert screen.getvalue().endswith(f"{GREEN}y{END}")


def stats(**changes: Any) -> RequestStats:
    made = RequestStats(passes=10, committed=25, expected=24.0, expecting=10)
    made.choices = Counter({"off": 5, "suffix": 3, "suffix+eagle": 2})
    made.accepted, made.drafted = Counter(suffix=10, eagle=5), Counter(suffix=20, eagle=24)
    made.seconds.update(plan=0.01, verify=0.99)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_summary_says_what_was_chosen_expected_and_got() -> None:
    assert show.leader_lines(stats()) == [
        "chosen    off 50% · suffix 30% · suffix+eagle 20% of 10 passes",
        "per pass  expected 2.40 · got 2.50",
        "time      plan 1.0% · draft 0.0% · verify 99.0% · sample 0.0% · other 0.0%",
    ]
    assert show.leader_lines(stats(expecting=8))[1] == "per pass  expected 3.00 in 8 of 10 · got 2.50"
    assert show.leader_lines(stats(expecting=0))[1] == "per pass  got 2.50"
    many = Counter({f"d{i}": 10 - i for i in range(8)})
    chosen = show.leader_lines(stats(choices=many, passes=many.total()))[0]
    assert chosen.endswith("d5 10% · 2 more 13% of 52 passes")
    legend = show.Painter(["grammar", "suffix", "eagle"]).legend(stats())
    assert legend.plain == "tokens    suffix 10 (40%) · eagle 5 (20%) · target 10 (40%)"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "x", "--show", "--json"], "drop one"),
        (["chat", "x", "--show", "--json"], "drop one"),
        (["generate", "x", "y", "--show"], "give one prompt"),
        (["generate", "x", "--show", "-t", "1", "--set", "n=2"], "give one prompt"),
        (
            ["generate", "x", "--trace", "t.jsonl", "--policy", "fixed"],
            "--trace shows the decisions of policy adaptive",
        ),
        (["chat", "x", "--trace", "t.jsonl", "--policy", "off"], "--trace shows the decisions of policy adaptive"),
        (
            ["generate", "x", "--trace", "no/t.jsonl", "--policy", "adaptive"],
            "decisions cannot be written to no/t.jsonl",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    bozza: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = bozza(*arguments, "--model", "/no/such")
    assert code == 2
    assert err.startswith("error:")
    assert says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_trace_keeps_each_decision_of_the_default_policy(
    bozza: Run, tmp_path: Path, folders: dict[str, Path], command: str
) -> None:
    file = tmp_path / "trace.jsonl"
    args = (command, "abab", "-m", folders["target"], "-n", 9, "-d", f"model:{folders['shallow']}", "--trace", file)
    for runs in (1, 2):  # a file that exists goes on
        assert bozza(*args)[0] == 0
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert sum(record["step"] == records[0]["step"] for record in records) == runs
    assert {"step", "request", "candidates", "choice", "expected", "seconds", "committed"} <= set(records[0])
    assert sum(record["committed"] for record in records) > 9


def test_show_says_what_the_default_policy_expected(bozza: Run, folders: dict[str, Path]) -> None:
    code, err = bozza("generate", "abab", "-m", folders["target"], "-n", 9, "-d", "suffix", "--show")
    assert code == 0
    assert re.search(r"chosen .* passes per pass expected \d+\.\d\d( in \d+ of \d+)? · got \d+\.\d\d time plan", err)
