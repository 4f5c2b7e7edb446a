"""Draft specifications: `ngram`, `ngram:min=1,max=8,k=10`, `suffix:k=12`, `model:NAME_OR_FOLDER,k=4` and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bozza.drafters.ngram import MAX_N, MIN_N, check_sizes
from bozza.errors import ConfigError

MAX_TOKENS = 64  # most tokens that one drafter may be asked for at once
DEFAULT_TOKENS = {
    "grammar": 8, "prediction": 16, "ngram": 8, "suffix": 12, "recycling": 24, "model": 4, "eagle": 24, "mtp": 4,
}  # fmt: skip
POLICIES = ("adaptive", "fixed", "off")
RULES = ("coupled", "rejection", "block")
DEFAULT_DRAFT = ("grammar", "prediction", "ngram")
OPTIONS = {
    "grammar": ("k",),
    "prediction": ("k",),
    "suffix": ("k",),
    "recycling": ("k",),
    "ngram": ("k", "min", "max"),
    "model": ("k", "width"),
    "eagle": ("k", "width"),
    "mtp": ("k", "width"),
}
# These take a name or folder. Without one, an eagle is the head of the package, an mtp the target's own modules.
NAMED = ("model", "eagle", "mtp")
PAID = NAMED  # these take more than microseconds
MAX_WIDTH = 16


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One drafter as a user names it.

    `tokens` is what policy `fixed` drafts with it at each step, and the most that policy `adaptive` does.
    """

    text: str = field(compare=False)
    kind: str
    tokens: int
    model: str | None = None
    options: Mapping[str, int] = field(default_factory=dict)


def parse_spec(text: str) -> DraftSpec:
    """Read one specification.

    Raises:
        ConfigError: the drafter or an option does not exist, or a value is out of range.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in OPTIONS:
        raise ConfigError(f"no drafter '{kind}': use {', '.join(OPTIONS)}:NAME_OR_FOLDER")
    parts = [part for part in rest.split(",") if part]
    model = parts.pop(0) if kind in NAMED and parts and not _is_option(kind, parts[0]) else None
    if kind == "model" and model is None:
        raise ConfigError(f"draft '{text}': say which model, as in model:NAME_OR_FOLDER")
    options: dict[str, int] = {}
    for name, value in (_option(kind, part) for part in parts):
        if name in options:
            raise ConfigError(f"draft '{text}': {name} is given twice")
        options[name] = value
    tokens = options.pop("k", DEFAULT_TOKENS[kind])
    if not 1 <= tokens <= MAX_TOKENS:
        raise ConfigError(f"draft '{text}': k={tokens} is out of range, use 1 to {MAX_TOKENS}")
    if not 1 <= (width := options.get("width", 1)) <= MAX_WIDTH:
        raise ConfigError(f"draft '{text}': width={width} is out of range, use 1 to {MAX_WIDTH}")
    if kind == "ngram":
        check_sizes(options.get("min", MIN_N), options.get("max", MAX_N))
    return DraftSpec(text.strip(), kind, tokens, model, options)


def _is_option(kind: str, part: str) -> bool:
    return part.partition("=")[0] in OPTIONS[kind]


def _option(kind: str, part: str) -> tuple[str, int]:
    name, equals, value = part.partition("=")
    if name not in OPTIONS[kind] or not equals:
        raise ConfigError(f"{kind} has no option '{part}': it takes {', '.join(f'{o}=N' for o in OPTIONS[kind])}")
    try:
        return name, int(value)
    except ValueError:
        raise ConfigError(f"{kind}: {name}={value} is not a whole number") from None


def drafter_names(specs: Sequence[DraftSpec]) -> list[str]:
    """A distinct name for each drafter: its kind, numbered from the second of a kind on."""
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        seen[spec.kind] = seen.get(spec.kind, 0) + 1
        names.append(spec.kind if seen[spec.kind] == 1 else f"{spec.kind}{seen[spec.kind]}")
    return names


def check_drafting(draft: Sequence[str] | None, policy: str, rule: str = "coupled") -> list[DraftSpec]:
    """The drafters that these options mean; contradictions are refused before anything is loaded.

    Raises:
        ConfigError: an option is unknown, out of range or would have no effect.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no policy '{policy}': use {', '.join(POLICIES)}")
    if rule not in RULES:
        raise ConfigError(f"no rule '{rule}': use coupled, rejection or block")
    if isinstance(draft, str):
        raise ConfigError(f"draft is a list of specifications: write draft=['{draft}']")
    if policy == "off":
        if draft:
            raise ConfigError("policy 'off' never drafts: drop the drafters, or use policy 'adaptive'")
        return []
    if draft is not None and not draft:
        raise ConfigError(f"policy '{policy}' needs a drafter: name one, or use policy 'off'")
    specs = [parse_spec(text) for text in (DEFAULT_DRAFT if draft is None else draft)]
    if twice := [spec for place, spec in enumerate(specs) if spec in specs[:place]]:
        raise ConfigError(f"drafter {twice[0].kind} is named twice with the same options: drop one")
    return specs
