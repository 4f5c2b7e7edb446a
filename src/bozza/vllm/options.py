"""What a user may set inside vLLM, in one environment variable: vLLM passes a class only its own configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bozza.drafters.history import check_sharing
from bozza.drafters.spec import MAX_TOKENS, DraftSpec, parse_spec
from bozza.errors import ConfigError
from bozza.leader.cost import CostModel

VARIABLE = "BOZZA_VLLM"
KINDS = ("suffix", "ngram")  # need nothing but the tokens, and vLLM gives nothing else
POLICIES = ("adaptive", "fixed")
CLOCKS = ("wall", "steps")
DEFAULT_DRAFT = (f"suffix:k={MAX_TOKENS}",)  # as many as num_speculative_tokens allows
# Of an engine that nobody has measured. Only the ratio counts: how long a step takes is measured at the first steps.
DEFAULT_COSTS: dict[str, Any] = {"verify": {"base": 1.0, "per_token": 0.01}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keys of the variable's JSON object.

    Attributes:
        draft: drafters, as on the command line; `k` is the most that one drafts, beside num_speculative_tokens.
        policy: "adaptive", or "fixed": always as much as there is.
        clock: "wall" learns what steps cost from their times. "steps" takes each step to cost what `costs` says, so
            that what is drafted depends on nothing but the tokens.
        shared_history: whether `suffix` may copy from other requests' outputs; a text names a file to keep them in.
            Can leak what others wrote: see "Shared history" in docs/design.md.
        costs: what steps cost, as `CostModel.from_document` reads it; without it a guess that is corrected.
        trace: a file for the leader's decisions, a JSON line for each request and step.
        metrics_port: a port on which this process serves its Prometheus metrics itself.

    Raises:
        ConfigError: a value is none of these, or would have no effect.
    """

    draft: tuple[str, ...] = DEFAULT_DRAFT
    policy: str = "adaptive"
    clock: str = "wall"
    shared_history: bool | str = False
    costs: Mapping[str, Any] | None = None
    trace: str | None = None
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.draft
        if isinstance(given, str) or not given or not all(isinstance(text, str) for text in given):
            raise ConfigError(f'{VARIABLE}: draft is {given!r}: use a list of drafters, as in ["suffix"]')
        object.__setattr__(self, "draft", tuple(given))
        self._check_choice("policy", POLICIES)
        self._check_choice("clock", CLOCKS)
        specs = self.specs()
        check_sharing(self.shared_history, specs)
        port: Any = self.metrics_port
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535):
            raise ConfigError(f"{VARIABLE}: metrics_port is {port!r}: use a port from 1 to 65535")
        trace: Any = self.trace
        if trace is not None and (not isinstance(trace, str) or not trace):
            raise ConfigError(f"{VARIABLE}: trace is {trace!r}: use the name of a file")
        if self.costs is not None:
            CostModel.from_document(self.costs)
        if self.policy == "fixed":
            self._check_fixed()

    def specs(self) -> list[DraftSpec]:
        """The drafters.

        Raises:
            ConfigError: one does not exist, or cannot work inside vLLM.
        """
        specs = [parse_spec(text) for text in self.draft]
        if wrong := [spec.kind for spec in specs if spec.kind not in KINDS]:
            raise ConfigError(f"{VARIABLE}: drafter '{wrong[0]}' does not work inside vLLM: use {' or '.join(KINDS)}")
        if twice := [spec for place, spec in enumerate(specs) if spec in specs[:place]]:
            raise ConfigError(f"{VARIABLE}: drafter {twice[0].kind} is named twice with the same options: drop one")
        return specs

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{VARIABLE}: {name} is {getattr(self, name)!r}: use {' or '.join(choices)}")

    def _check_fixed(self) -> None:
        idle = {"clock": self.clock != "wall", "costs": self.costs is not None, "trace": self.trace is not None}
        if named := [name for name, given in idle.items() if given]:
            raise ConfigError(f"{VARIABLE}: policy 'fixed' has no use for {named[0]}: drop it")


def read_options(environ: Mapping[str, str]) -> Options:
    """The options in an environment: a JSON object, or the path of a file that holds one. Absent: the defaults.

    Raises:
        ConfigError: it cannot be read, or an option is unknown or wrong.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return Options()
    source = VARIABLE
    if not text.startswith("{"):
        source = f"{VARIABLE}, file {text}"
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is no text"
            raise ConfigError(
                f"{source} cannot be read ({reason}): name a JSON file, or write the JSON itself"
            ) from None
    try:
        given = json.loads(text)
    except ValueError as problem:
        raise ConfigError(f'{source} is not JSON ({problem}): write {{"draft": ["suffix"]}}') from None
    known = [field.name for field in fields(Options)]
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: write a JSON object of {', '.join(known)}")
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{source}: unknown option '{unknown[0]}', use {', '.join(known)}")
    return Options(**given)
