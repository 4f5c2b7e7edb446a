"""How results look on a terminal, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rich import box
from rich.color import ColorSystem
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from bozza.cli.options import err, out
from bozza.core import RequestStats

if TYPE_CHECKING:
    from bozza.stream import Piece

# Of the sixteen colours that every terminal has, in the user's own shades; the last are the hardest to read.
TINTS = (
    "green", "cyan", "yellow", "magenta", "bright_blue", "bright_red",
    "bright_green", "bright_cyan", "bright_yellow", "bright_magenta", "red", "blue",
)  # fmt: skip
MOST_CHOICES = 6  # that a line has room for
# Control characters are shown by their pictures, those above ASCII, which have none, as unknown; lines and tabs act.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def write(text: str) -> None:
    """Model text on standard output exactly as it is: nothing in it is markup."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stats_document(stats: RequestStats) -> dict[str, Any]:
    """Statistics of one request as JSON."""
    known = {entry.name: getattr(stats, entry.name) for entry in fields(stats)}
    return known | {"committed_per_pass": stats.committed_per_pass}


def output_document(output: Any) -> dict[str, Any]:
    """One output as JSON; log-probabilities only if they were asked for."""
    document = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stats": stats_document(output.stats),
    }
    if output.error is not None:
        document["error"] = output.error
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(output, name)) is not None:
            document[name] = [entry and asdict(entry) for entry in entries]
    return document


def stats_line(stats: RequestStats) -> str:
    """Statistics of one request in a line."""
    seconds = sum(stats.seconds.values())
    parts = [f"{stats.committed} tokens in {seconds:.2f} s", f"{stats.committed / seconds:.1f} tokens/s"]
    parts.append(f"{stats.committed_per_pass:.2f} per pass")
    parts += [f"{name}: {stats.accepted[name]} of {drafted} accepted" for name, drafted in stats.drafted.items()]
    return " · ".join(parts)


class Painter:
    """Shows who guessed what: a colour for each drafter, where standard output is a terminal that has colours.

    Args:
        names: of the drafters, as they are configured; each always has the same colour.
    """

    def __init__(self, names: Sequence[str]) -> None:
        console = Console()  # of this moment: terminal, TERM and NO_COLOR
        plain = console.color_system is None or console.no_color
        self._styles = {} if plain else {name: Style(color=TINTS[i % len(TINTS)]) for i, name in enumerate(names)}
        self._names = list(names)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Model text on standard output. Nothing in it is markup, and nothing in it commands the terminal."""
        for piece in pieces:
            style = self._styles.get(piece.drafter or "", Style())
            write(style.render(piece.text.translate(PICTURES), color_system=ColorSystem.STANDARD))

    def legend(self, stats: RequestStats) -> Text:
        """How many tokens of the output each drafter guessed, in its colour, and how many the target made itself."""
        counts = {name: stats.accepted[name] for name in self._names if stats.drafted[name]}
        own = stats.committed - stats.accepted.total()
        line = Text("tokens    ")
        for name, count in counts.items():
            line.append(f"{name} {count} ({_share(count, stats.committed)})", self._styles.get(name, ""))
            line.append(" · ")
        return line.append(f"target {own} ({_share(own, stats.committed)})")

    def summary(self, stats: RequestStats) -> None:
        """On standard error: whose tokens they are, what the leader did, and where the time went."""
        err.print(self.legend(stats), soft_wrap=True)
        for line in leader_lines(stats):
            err.print(Text(line), soft_wrap=True)


def leader_lines(stats: RequestStats) -> list[str]:
    """What the leader chose, expected and got for a request, and where the time went."""
    ranked = stats.choices.most_common()
    chosen = [f"{name} {_share(passes, stats.passes)}" for name, passes in ranked[:MOST_CHOICES]]
    if rest := ranked[MOST_CHOICES:]:
        chosen.append(f"{len(rest)} more {_share(sum(passes for _, passes in rest), stats.passes)}")
    got = f"got {stats.committed_per_pass:.2f}"
    if stats.expecting:
        among = "" if stats.expecting == stats.passes else f" in {stats.expecting} of {stats.passes}"
        got = f"expected {stats.expected / stats.expecting:.2f}{among} · {got}"
    return [
        f"chosen    {' · '.join(chosen)} of {stats.passes} passes",
        f"per pass  {got}",
        f"time      {shares(stats.seconds)}",
    ]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def shares(seconds: Mapping[Any, float]) -> str:
    """Which part of the time each stage took."""
    total = sum(seconds.values())
    return " · ".join(f"{stage} {spent / total:.1%}" for stage, spent in seconds.items())


def bench_card(rows: list[dict[str, Any]]) -> Table:
    """The rows of a benchmark document as a table that fits a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for heading in ("workload", "policy"):
        table.add_column(heading)
    for heading in ("tokens/s", "ratio", "per pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("guessed", "identical"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            escape(row["workload"]),
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_off']:.2f}",
            f"{row['committed_per_pass']:.2f}",
            drafted_share(row),
            identity(row),
            end_section=row["policy"] != "off",
        )
    return table


def drafted_share(row: dict[str, Any]) -> str:
    """Which part of the output each drafter guessed."""
    return ", ".join(f"{name} {entry['share']:.0%}" for name, entry in row["drafters"].items()) or "-"


def identity(row: dict[str, Any]) -> str:
    """Whether the outputs equal the plain ones, in a word or two; "in law" where no more is promised."""
    if row["policy"] == "off":
        return "-"
    if row["identical"] is None:
        return "in law"
    verdicts = [difference["verdict"] for difference in row["differences"]]
    if "bug" in verdicts:
        return f"[red]NO, {verdicts.count('bug')} beyond rounding[/red]"
    if verdicts:
        return f"[yellow]{len(verdicts)} near-tie(s)[/yellow]"
    return "[green]yes[/green]"


def theory_line(row: dict[str, Any]) -> str:
    """What a model drafter should have gained, and what it did."""
    found = row["theory"]
    return (
        f"model drafter, {row['workload']}: alpha {found['alpha']:.2f} · c {found['c']:.2f} · gamma {found['gamma']} · "
        f"expected {found['expected']:.2f}x · measured {found['measured']:.2f}x · best gamma {found['best_gamma']}"
    )


def print_bench(document: dict[str, Any]) -> None:
    """The card of a benchmark document; below it what theory says of a model drafter, and where the time went."""
    facts = document["environment"]
    out.print(
        f"[bold]{escape(str(facts['model']))}[/bold] · {facts['dtype']} on {facts['device']} · "
        f"{facts['threads']} threads · batch {facts['batch']} · {facts['params']['max_tokens']} tokens each"
    )
    out.print(bench_card(document["rows"]))
    for row in document["rows"]:
        if row["theory"] is not None:
            out.print(escape(theory_line(row)), soft_wrap=True)
    out.print(f"time ({document['rows'][-1]['policy']}): {shares(document['rows'][-1]['seconds_by_stage'])}")
