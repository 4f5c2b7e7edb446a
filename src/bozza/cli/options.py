"""Options that several commands share, and what they become."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from bozza.core import SamplingParams
from bozza.errors import ConfigError

out = Console(highlight=False)  # results
err = Console(stderr=True, highlight=False)  # everything said about them

Model = Annotated[str, typer.Option("--model", "-m", help="Alias, folder, .gguf file or hub id.")]
Draft = Annotated[
    list[str] | None,
    typer.Option("--draft", "-d", help="Drafter; repeatable: ngram, ngram:min=1,max=8,k=10, model:NAME_OR_FOLDER,k=4."),
]
Policy = Annotated[str, typer.Option("--policy", help="fixed: always draft k tokens. off: plain decoding.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an output.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total mass.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="One seed, one text. Without it each run differs.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (the checkpoint's), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option("--device", help="auto (a GPU when there is one), cpu, cuda, cuda:1.")]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Most prompts in one pass.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def sampling(
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    ignore_eos: bool = False,
) -> SamplingParams:
    """Sampling parameters from flags; flags that could not have an effect are refused."""
    if temperature == 0.0:
        given = {"--top-p": top_p, "--top-k": top_k, "--seed": seed}
        if useless := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(f"{useless[0]} has no effect on greedy decoding: add --temperature, or drop it")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else top_k,
        seed=seed,
        ignore_eos=ignore_eos,
    )


def load_llm(model: str, draft: list[str] | None, policy: str, dtype: str, device: str, batch: int = 1) -> Any:
    """The LLM that the flags describe. Wrong flags fail before torch is imported and a model is read."""
    from bozza.drafters.spec import check_drafting

    check_drafting(draft, policy)
    if batch < 1:
        raise ConfigError(f"--batch {batch}: use at least 1")
    with err.status(f"loading {model}"):
        from bozza import LLM

        quieten()
        return LLM(
            model,
            draft=draft,
            policy=policy,
            dtype=dtype,
            device=device,
            max_batch=batch,
            token_budget=max(512, 16 * batch),
        )


def quieten() -> None:
    """Transformers' own progress bars and notices are for people who load models by hand."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
