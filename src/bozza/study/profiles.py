"""Cost profiles on disk: what was measured on this machine, for exactly this model, these drafters and these versions.

A profile is one file of JSON that also holds the setting it was measured in. It is used only where every field of the
setting is the same, and it is replaced as a whole, so that a crash leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bozza.drafters.spec import DraftSpec, parse_spec
from bozza.errors import ConfigError
from bozza.leader.cost import CostModel

if TYPE_CHECKING:
    from bozza.llm import LLM

FORMAT, VERSION = "bozza-costs", 4  # 4: compiled products and attention, large pages
WEIGHTLESS = ("grammar", "prediction", "ngram", "suffix")  # drafters that change no cost


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a cost may depend on."""

    processor: str  # its name; that of the accelerator too, if the model runs on one
    cores: int
    threads: int
    device: str
    dtype: str
    weights: str  # see `LLM.weights`
    compiled: bool
    model: str  # architecture, shape and vocabulary, see `bozza.models.identity`
    drafters: tuple[str, ...]  # those that take time or read passes, with their options, in order
    rule: str
    invariant: bool
    bozza: str
    torch: str
    transformers: str
    python: str

    @property
    def key(self) -> str:
        """A digest that names the file."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=12).hexdigest()


class Stored(NamedTuple):
    """What was found for a setting: a cost document, or why there is none."""

    costs: dict[str, Any] | None
    reason: str = ""


def setting_of(llm: LLM) -> Setting:
    """The setting that an LLM runs in."""
    from bozza.bench import environment
    from bozza.models.identity import identity
    from bozza.models.loading import Loaded

    facts = environment(llm)
    return Setting(
        processor=facts["processor"] + _accelerator(llm.runner.device),
        cores=facts["cores"] or 0,
        model=identity(Loaded(llm.model, llm.tokenizer, llm.model_path), llm.runner.vocab_size),
        drafters=tuple(_named(spec) for spec in map(parse_spec, llm.draft) if spec.kind not in WEIGHTLESS),
        **{name: facts[name] for name in ("threads", "device", "dtype", "weights", "compiled", "rule", "invariant")},
        **{name: facts[name] for name in ("bozza", "torch", "transformers", "python")},
    )


def _named(spec: DraftSpec) -> str:
    """A specification in full, however it was written."""
    options = ",".join(f"{name}={value}" for name, value in sorted({**spec.options, "k": spec.tokens}.items()))
    return f"{spec.kind}:{spec.model or ''},{options}"


def _accelerator(device: Any) -> str:
    import torch

    return f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""


def costs_folder() -> Path:
    """Where profiles are kept: `costs` in the cache folder."""
    from bozza.models.catalog import cache_folder

    return cache_folder() / "costs"


def path_of(setting: Setting, folder: Path) -> Path:
    """The file that the profile of a setting has or will have."""
    return folder / f"{setting.key}.json"


def load(setting: Setting, folder: Path) -> Stored:
    """The profile of a setting. One that is damaged, or of another setting, counts as absent."""
    file = path_of(setting, folder)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Stored(None, "nothing has been measured in this setting")
    except OSError as problem:
        return Stored(None, f"{file} cannot be read ({problem.strerror})")
    except ValueError:  # not JSON, or not even text
        return Stored(None, f"{file} is damaged")
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        return Stored(None, f"{file} is no cost profile of this version")
    if document.get("sum") != _sum(document):
        return Stored(None, f"{file} is damaged")
    if differing := _differences(document.get("setting"), setting):
        return Stored(None, f"{file} was measured in another setting: {'; '.join(differing)}")
    costs: dict[str, Any] = document.get("costs", {})
    try:
        CostModel.from_document(costs)
    except (ConfigError, TypeError, ValueError) as problem:
        return Stored(None, f"{file} holds no costs ({problem})")
    return Stored(costs)


def save(setting: Setting, costs: dict[str, Any], folder: Path) -> Path | None:
    """Replace the profile of a setting, whatever is there; returns its file.

    A profile saves a calibration and nothing else, so what cannot be written is only warned of; None then.
    """
    file = path_of(setting, folder)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "setting": asdict(setting),
        "costs": costs,
    }
    text = json.dumps(document | {"sum": _sum(document)}, indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(file, text)
    except OSError as problem:
        warnings.warn(
            f"costs are measured anew each time: {folder} cannot be written ({problem.strerror}), "
            "set BOZZA_CACHE to a folder of yours",
            stacklevel=2,
        )
        return None
    return file


def _replace(file: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _sum(document: dict[str, Any]) -> str:
    """A checksum of all but itself."""
    rest = json.dumps({name: value for name, value in document.items() if name != "sum"}, sort_keys=True)
    return hashlib.blake2b(rest.encode(), digest_size=12).hexdigest()


def _differences(given: Any, setting: Setting) -> list[str]:
    """The fields in which a stored setting is not ours."""
    ours = json.loads(json.dumps(asdict(setting)))
    known = given if isinstance(given, dict) else {}
    names = [entry.name for entry in fields(setting)] + sorted(set(known) - set(ours))
    return [
        f"{name} {known.get(name)!r}, not {ours.get(name)!r}" for name in names if known.get(name) != ours.get(name)
    ]
