"""What steps cost in an LLM's setting: the stored profile, or a calibration that is then stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bozza.drafters.spec import PAID, drafter_names, parse_spec
from bozza.study import profiles
from bozza.study.calibrate import BATCH, calibrate
from bozza.verify import PROMPTS

if TYPE_CHECKING:
    from bozza.llm import LLM


def known_costs(llm: LLM) -> dict[str, Any]:
    """A cost document for this LLM's model, drafters, machine and versions. Takes a few seconds the first time.

    Args:
        llm: under any policy that needs no costs itself.
    """
    setting, folder = profiles.setting_of(llm), profiles.costs_folder()
    costs = profiles.load(setting, folder).costs
    if costs is None:
        costs = measure(llm)
        profiles.save(setting, costs, folder)
    return costs


def measure(llm: LLM, text: Sequence[int] = (), seconds: float = 4.0) -> dict[str, Any]:
    """A fresh calibration; it does not depend on how many requests the LLM runs at once.

    Args:
        llm: under any policy that needs no costs itself.
        text: see `calibrate`.
        seconds: about how long it may take.
    """
    specs = [parse_spec(draft) for draft in llm.draft]
    names = drafter_names(specs)
    paid = {name: spec.tokens for name, spec in zip(names, specs, strict=True) if spec.kind in PAID}
    wide = llm.apart(BATCH)
    if not text and llm.tokenizer is not None:
        text = llm.encode(PROMPTS[0])
    return calibrate(lambda leader: wide.with_leader(leader).engine, paid, text=text, seconds=seconds)
