"""Does speculation change nothing on this model, with these drafters, on this machine?

Two kinds of promises, two kinds of checks. Greedy outputs, and under rule `coupled` seeded ones, must be the tokens of
plain decoding: each difference is judged by the target's own margin. Under every rule sampled tokens must follow the
target's law: each token x that was drawn at a place with law p is turned into u = sum of p over the tokens before x in
some order, plus p(x) v with v uniform. If and only if the law is right at every place, all u are independent and
uniform on [0, 1] (Rosenblatt, 1952), whatever prompts and prefixes there were. Tested are the u themselves, in two
orders, and the difference of each from the one after it, modulo 1: their empirical distributions are then within
sqrt(ln(2 / alpha) / 2 n) of uniform with probability 1 - alpha (Dvoretzky-Kiefer-Wolfowitz-Massart), and a fault that
moves one of them by twice that much is found with the same probability. Temperature is 1, and nothing is filtered.
The laws come from plain forward passes of the transformers model, so no ragged code judges itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bozza.drafters.spec import RULES
from bozza.errors import ConfigError
from bozza.exactness import Difference
from bozza.params import SamplingParams

if TYPE_CHECKING:
    from bozza.llm import LLM

FALSE_ALARM = 1e-4  # of each law check
BATCH = 16
CHUNK = 256  # places whose laws are held at a time
PROMPTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\ndef median(values):\n",
    "The ferry leaves the harbour at seven. The ferry leaves the island at nine. The ferry leaves",
    "Q: What is 17 + 25?\nA: 17 + 25 = 42.\nQ: What is 34 + 19?\nA:",
    "Dear Ms Alder,\n\nthank you for your letter of the 3rd. I am writing to",
    '[{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, {"name":',
    "Once upon a time, in a village by the sea, there lived",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and what became of it."""

    name: str
    verdict: Literal["ok", "tie", "bug"]
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of a run."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True when no check found a bug; near-ties are none."""
        return all(check.verdict != "bug" for check in self.checks)


def checks_of(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 64,
    samples: int = 2048,
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Run the checks one by one.

    Args:
        llm: with the drafters to be checked.
        prompts: token ids; each leaves room for `tokens` more.
        tokens: length of each output.
        samples: least number of sampled tokens for each law check.
        on_check: told the name of a check before it runs.

    Raises:
        ConfigError: the LLM never drafts, so that there is nothing to check.
    """
    if not prompts:
        raise ConfigError("there are no prompts to verify with: give at least one")
    if tokens < 1 or samples < 1:
        raise ConfigError(f"tokens is {tokens}, samples {samples}: use at least 1 of each")
    if llm.policy == "off":
        raise ConfigError("policy 'off' never drafts, there is nothing to verify: use policy 'adaptive' or 'fixed'")
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for name, chosen in (("greedy", params), ("seed", replace(params, temperature=1.0, seed=1))):
        on_check(name)
        yield _identity(llm.with_policy(llm.policy, llm.draft, rule="coupled"), name, prompts, chosen)
    for rule in RULES:
        on_check(f"law of {rule}")
        yield _law(llm.with_policy(llm.policy, llm.draft, rule=rule, max_batch=BATCH), rule, prompts, tokens, samples)


def _identity(llm: LLM, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Check:
    """Outputs with drafts, one by one and together, against plain decoding one by one."""
    plain_llm, alone = (llm.with_policy(*policy, max_batch=1) for policy in (("off",), (llm.policy, llm.draft)))
    plain = plain_llm.generate(prompts, params)
    differences: list[Difference] = []
    accepted = drafted = 0
    for other_llm in (alone, llm):
        others = other_llm.generate(prompts, params)
        found = [llm.first_difference(a, b, params) for a, b in zip(plain, others, strict=True)]
        differences += [difference for difference in found if difference is not None]
        accepted += sum(sum(out.stats.accepted.values()) for out in others)
        drafted += sum(sum(out.stats.drafted.values()) for out in others)
    if drafted == 0:
        raise ConfigError("nothing was drafted, so nothing can be verified: other drafters, prompts or more tokens")
    verdicts = [difference.verdict for difference in differences]
    verdict: Literal["ok", "tie", "bug"] = "bug" if "bug" in verdicts else "tie" if verdicts else "ok"
    outputs = 2 * len(plain)
    detail = f"{outputs - len(verdicts)} of {outputs} outputs identical"
    if differences:
        detail += f", {verdicts.count('tie')} near-ties, {verdicts.count('bug')} bugs"
        worst = max(differences, key=lambda d: (d.verdict == "bug", math.inf if d.margin is None else d.margin))
        margin = "an output ended early" if worst.margin is None else f"margin {worst.margin:.2g}"
        detail += f" (worst: token {worst.position}, {margin}, rounding {worst.bound:.2g})"
    detail += f"; {accepted} of {drafted} drafted tokens accepted"
    figures = {"outputs": outputs, "accepted": accepted, "drafted": drafted}
    return Check(name, verdict, detail, figures | {"differences": [asdict(difference) for difference in differences]})


def _law(llm: LLM, rule: str, prompts: Sequence[Sequence[int]], tokens: int, samples: int) -> Check:
    """Sampled tokens against the target's law at their places."""
    rounds = math.ceil(samples / (tokens * len(prompts)))
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=1 + turn * len(prompts) + which)
        for turn in range(rounds)
        for which in range(len(prompts))
    ]
    outputs = llm.generate([list(prompt) for prompt in prompts] * rounds, params)
    generator = torch.Generator().manual_seed(0)
    views = views_of([uniforms_of(llm.model, out.prompt_token_ids, out.token_ids, generator) for out in outputs])
    count = views.shape[1]
    bound = math.sqrt(math.log(2 * len(views) / FALSE_ALARM) / (2 * count))
    distance = max(map(deviation, views))
    accepted = sum(sum(out.stats.accepted.values()) for out in outputs)
    drafted = sum(sum(out.stats.drafted.values()) for out in outputs)
    detail = (
        f"distance {distance:.4f}, allowed {bound:.4f} ({count} tokens, false alarm {FALSE_ALARM:.0e}); "
        f"{accepted} of {drafted} drafted tokens accepted"
    )
    figures = {"distance": distance, "bound": bound, "tokens": count, "false_alarm": FALSE_ALARM}
    figures |= {"accepted": accepted, "drafted": drafted}
    return Check(f"law of {rule}", "bug" if distance > bound else "ok", detail, figures)


def views_of(uniforms: Sequence[Tensor]) -> Tensor:
    """What is tested, each row uniform if the laws are right [3, tokens].

    Args:
        uniforms: from `uniforms_of`, one for each output.
    """
    one_by_one = torch.cat(list(uniforms), dim=1)
    return torch.cat([one_by_one, (one_by_one[:1] - one_by_one[:1].roll(-1, dims=1)) % 1.0])


def uniforms_of(model: Any, prompt: Sequence[int], output: Sequence[int], generator: torch.Generator) -> Tensor:
    """The u of each token of an output sampled at temperature 1 [2, tokens]: in order of probability, and shuffled.

    Args:
        model: the transformers model.
        prompt: token ids.
        output: token ids that were drawn after them.
        generator: of the v; one for all outputs of a check, since equal outputs must not get equal ones.
    """
    parts = [
        _uniforms(model, [*prompt, *output[:start]], output[start : start + CHUNK], generator)
        for start in range(0, len(output), CHUNK)
    ]
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def _uniforms(model: Any, prompt: Sequence[int], output: Sequence[int], generator: torch.Generator) -> Tensor:
    ids = torch.tensor([[*prompt, *output]], device=model.device)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
    laws = logits.double().softmax(dim=1)
    drawn = torch.tensor(output, device=model.device)[:, None]
    chosen = laws.gather(1, drawn)
    order = torch.randperm(laws.shape[1], generator=generator).to(model.device)
    index = torch.arange(laws.shape[1], device=model.device)
    likelier = (laws > chosen) | ((laws == chosen) & (index < drawn))
    before = torch.stack([(laws * likelier).sum(dim=1), (laws * (order < order[drawn])).sum(dim=1)]).cpu()
    uniforms: Tensor = before + torch.rand(before.shape, dtype=torch.float64, generator=generator) * chosen[:, 0].cpu()
    return uniforms


def deviation(uniforms: Tensor) -> float:
    """The largest distance between the empirical distribution of the values and the uniform one."""
    values = uniforms.sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return float(torch.maximum((steps[1:] - values).max(), (values - steps[:-1]).max()))
