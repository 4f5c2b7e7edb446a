"""The mtp drafter: what it drafts is what its modules say by their definition, however the work was divided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bozza import LLM, SamplingParams
from bozza.core import Draft, Request
from bozza.drafters import heads
from bozza.models.loading import load
from bozza.models.mtp_files import save_mtp
from mtp_checkpoints import publish, tiny_modules
from tiny import tiny, token_prompts

TARGETS = ("deepseek_v3", "exaone_moe", "glm4_moe", "mellum", "mimo_v2_flash", "llama")


@pytest.fixture(autouse=True)
def _all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees as deep as they can be, however unlikely it is that the target gets so far."""
    monkeypatch.setattr("bozza.drafters.heads.LEVEL", 0.0)


@pytest.fixture(params=TARGETS, scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A target, and the drafter that means its modules."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        model = tiny("llama")
        save_mtp(tiny_modules(model, steps=3), folder / "heads", "tiny")
        return model, f"mtp:{folder / 'heads'}"
    return load(publish(request.param, folder).folder).model, "mtp"


def mask(config: Any, layer: int, count: int) -> torch.Tensor:
    """Additive, as transformers' own attention takes it."""
    place = torch.arange(count)
    seen = place[None] <= place[:, None]
    if (getattr(config, "layer_types", None) or [""] * 9)[layer] == "sliding_attention":
        seen &= place[None] > place[:, None] - config.sliding_window
    return torch.zeros(1, 1, count, count).masked_fill(~seen, -torch.inf)


@torch.no_grad()
def run(model: Any, module: Any, index: int, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """A module over all of its slots at once, by transformers' own attention."""
    embeds = model.get_input_embeddings()(torch.tensor(tokens))
    mixed = module.eh_proj(torch.cat([module.enorm(embeds), module.hnorm(hidden)], dim=1))[None]
    config = module.block.self_attn.config
    config._attn_implementation = "eager"
    places = torch.arange(len(tokens))[None]
    by_kind = "full_attention" in config.rope_parameters
    rotary = model.base_model.rotary_emb(mixed, places, *([config.layer_types[index]] if by_kind else []))
    return module.norm(
        module.block(
            mixed,
            attention_mask=mask(config, index, len(tokens)),
            position_ids=places,
            position_embeddings=rotary,
        )[0]
    )


@torch.no_grad()
def laws(model: Any, modules: Sequence[Any], tokens: Sequence[int], path: Sequence[int]) -> list[torch.Tensor]:
    """What modules guess after `tokens` and each beginning of `path`: equations 21 to 23, nothing cached.

    Module k runs over slots 0 to n - 1, n the tokens that the target has read; deeper levels append slots to the last.
    """
    text = [*tokens, *path]
    count = len(tokens) - 1
    hidden = model.base_model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
    given, found = hidden, []
    for level in range(1, len(path) + 2):
        given = hidden if level <= len(modules) else torch.cat([given, hidden[-1:]])
        step = min(level, len(modules))
        hidden = run(model, modules[step - 1], step - 1, given, text[step : step + len(given)])
        assert len(hidden) == count + max(level - len(modules), 0)
        found.append(model.lm_head(hidden[-1]).softmax(dim=0))
    return found


Drafted = list[tuple[list[int], Draft]]


def watched(llm: LLM) -> Drafted:
    """All that the drafter will draft, and after which tokens."""
    drafter = llm.engine._drafters["mtp"]
    found: Drafted = []
    draft = drafter.draft

    def noted(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = draft(requests, budgets)
        found.extend((list(request.tokens), one) for request, one in zip(requests, drafts, strict=True))
        return drafts

    drafter.draft = noted
    return found


def modules_of(llm: LLM) -> list[Any]:
    return [runner.head for runner in llm.engine._drafters["mtp"]._runners]


def check(model: Any, modules: Sequence[Any], found: Drafted, most: int) -> None:
    """Each node is a likeliest child of its parent, and as likely as the modules say."""
    drafted = [(tokens, draft) for tokens, draft in found if len(draft)]
    assert len(drafted) > 20
    assert max(max(draft.depths()) for _, draft in drafted) > len(modules)  # the last module was used again
    for tokens, draft in drafted[:: max(1, len(drafted) // most)]:
        for node, path in enumerate(draft.paths()):
            guesses = laws(model, modules, tokens, path[:-1])
            value = 1.0
            for token, guess in zip(path, guesses, strict=True):
                value *= float(guess[token])
            assert draft.confidence(node) == pytest.approx(value, rel=2e-3, abs=1e-5)
            if draft.children()[draft.parents[node]][0] == node:
                assert float(guesses[-1][path[-1]]) == pytest.approx(float(guesses[-1].max()), rel=1e-3)


@pytest.mark.parametrize(("width", "k"), [(1, 5), (3, 14)])
def test_drafts_are_what_the_modules_say(loaded: tuple[Any, str], width: int, k: int, monkeypatch: Any) -> None:
    """In a batch, in chunks, after rejected and accepted drafts of its own and of another drafter."""
    monkeypatch.setattr(heads, "CHUNK", 5)
    monkeypatch.setattr("bozza.drafters.tree.LEAST", 0.0)
    model, draft = loaded
    comma = "," if ":" in draft else ":"
    llm = LLM(
        model,
        policy="fixed",
        draft=[f"{draft}{comma}k={k},width={width}", "prediction:k=3"],
        max_batch=4,
        token_budget=48,
    )
    prompts = token_prompts(5)
    truth = llm.with_policy("off").generate(prompts, SamplingParams(max_tokens=14))
    found = watched(llm)
    params = [SamplingParams(max_tokens=14, prediction=out.token_ids[:9]) for out in truth]
    outputs = llm.generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in truth]
    check(model, modules_of(llm), found, 12)


@pytest.mark.parametrize("batch", [1, 8])
def test_output_is_the_targets_own(loaded: tuple[Any, str], batch: int) -> None:
    model, draft = loaded
    comma = "," if ":" in draft else ":"
    llm = LLM(model, policy="fixed", draft=[f"{draft}{comma}k=7,width=2"], max_batch=batch)
    prompts = token_prompts(8)
    for params in (
        [SamplingParams(max_tokens=16)] * len(prompts),
        [SamplingParams(max_tokens=16, temperature=0.8, seed=seed) for seed in range(len(prompts))],
    ):
        plain = llm.with_policy("off").generate(prompts, params)
        drafted = llm.generate(prompts, params)
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
        assert sum(out.stats.drafted["mtp"] for out in drafted) > 100


def test_an_interrupted_draft_has_not_happened(loaded: tuple[Any, str]) -> None:
    model, draft = loaded
    llm = LLM(model, policy="fixed", draft=[draft])
    found = watched(llm)
    undisturbed = llm.generate(token_prompts(3), SamplingParams(max_tokens=10))
    before = list(found)
    found.clear()
    drafter = llm.engine._drafters["mtp"]
    for runner in drafter._runners:
        runner.forward = failing(runner.forward)
    draft_all = drafter.draft

    def again(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        while True:
            try:
                return draft_all(requests, budgets)
            except KeyboardInterrupt:
                pass

    drafter.draft = again
    outputs = llm.generate(token_prompts(3), SamplingParams(max_tokens=10))
    assert [out.token_ids for out in outputs] == [out.token_ids for out in undisturbed]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in before]
    for (_, ours), (_, theirs) in zip(found, before, strict=True):
        assert ours == theirs
        assert ours.confidences == pytest.approx(theirs.confidences, rel=1e-4)


def failing(forward: Any) -> Any:
    """Stops after the pass has changed the slots, once before each pass that goes through."""
    calls = 0

    def sometimes(rows: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = forward(rows, **options)
        if calls % 7 == 3:
            raise KeyboardInterrupt
        return result

    return sometimes


def test_modules_of_a_path_and_of_the_target(tmp_path: Path) -> None:
    """Named by folder, modules of a checkpoint are the same as without a name."""
    folder = publish("mellum", tmp_path).folder
    model = load(folder).model
    outputs = []
    for draft in ("mtp:k=3", f"mtp:{folder},k=3"):
        llm = LLM(model, policy="fixed", draft=[draft])
        found = watched(llm)
        llm.generate(token_prompts(4), SamplingParams(max_tokens=8))
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert outputs[0]
