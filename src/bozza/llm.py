"""The public face: text in, text out, sooner."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from bozza.core import FinishReason, Request, RequestStats, SamplingParams, StepStats
from bozza.drafters import Drafter, NgramDrafter
from bozza.drafters.model import ModelDrafter
from bozza.drafters.spec import DraftSpec, check_drafting, drafter_names
from bozza.engine import Engine
from bozza.engine.scheduler import check_limits
from bozza.errors import ConfigError, ModelError, PromptError, first_line
from bozza.exactness import Difference, first_difference
from bozza.leader import Fixed, Leader, Off
from bozza.models.loading import Loaded, end_ids, load
from bozza.models.probe import load_runner
from bozza.models.vocabulary import check_same_vocabulary
from bozza.rules import Coupled
from bozza.stream import Stream
from bozza.text import decode

Prompt = str | Sequence[int]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt became. `token_ids` holds the end token if there was one; `text` shows no special tokens."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: RequestStats


class LLM:
    """A target model with its drafters, ready to generate.

    Args:
        model: an alias ("smollm2"), a folder, a .gguf file, a hub id, or a loaded transformers model (which is put into
            evaluation mode and otherwise left as it is).
        tokenizer: needed for text when `model` is a loaded one; otherwise it comes with the model.
        draft: drafter specifications, in order of trust: "ngram", "ngram:min=1,max=8,k=10", "model:NAME_OR_FOLDER,k=4".
            The default is "ngram", or nothing with policy "off".
        policy: "fixed" drafts k tokens with every drafter at every step, "off" decodes plainly.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16", "float32", or a torch dtype.
        device: "auto" (a GPU when there is one), "cpu", "cuda", "cuda:1".
        max_batch: most requests in one pass; more wait.
        token_budget: most tokens in one pass; longer prompts are read in chunks.
        fresh_seed: where the seeds of unseeded requests come from.

    Raises:
        ConfigError: an option is unknown, out of range or would have no effect.
        ModelError: a model cannot be had, or cannot run exactly (`UnsupportedModel`).
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        tokenizer: Any = None,
        draft: Sequence[str] | None = None,
        policy: str = "fixed",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_batch: int = 32,
        token_budget: int = 512,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        specs = check_drafting(draft, policy)
        check_limits(max_batch, token_budget)
        loaded = _load_target(model, tokenizer, dtype, device)
        self.tokenizer = loaded.tokenizer
        self.model_path = loaded.path
        self.runner = load_runner(loaded.model)
        self._loaded = loaded
        self._fresh_seed = fresh_seed
        self._max_batch, self._token_budget = max_batch, token_budget
        self._draft_models = {
            spec.model: load_draft_model(spec.model, loaded) for spec in specs if spec.model is not None
        }
        self._set_policy(specs, policy)

    def with_policy(self, policy: str, draft: Sequence[str] | None = None, *, max_batch: int | None = None) -> LLM:
        """Another LLM over the same loaded models. Draft models must be among those of this one.

        Raises:
            ConfigError: as for `LLM`.
        """
        specs = check_drafting(draft, policy)
        if missing := [spec.model for spec in specs if spec.model and spec.model not in self._draft_models]:
            raise ConfigError(f"draft model {missing[0]} is not loaded: name it when the LLM is made")
        twin = object.__new__(LLM)
        twin.__dict__.update(self.__dict__)
        twin._max_batch = self._max_batch if max_batch is None else max_batch
        twin._set_policy(specs, policy)
        return twin

    def _set_policy(self, specs: Sequence[DraftSpec], policy: str) -> None:
        self.policy, self.draft = policy, tuple(spec.text for spec in specs)
        names = drafter_names(specs)
        drafters = [self._drafter(spec, name) for spec, name in zip(specs, names, strict=True)]
        leader: Leader = Off()
        if policy == "fixed":
            leader = Fixed({name: spec.tokens for spec, name in zip(specs, names, strict=True)})
        self.engine = Engine(
            self.runner,
            drafters,
            Coupled(),
            leader,
            end_ids=end_ids(self._loaded.model),
            max_running=self._max_batch,
            token_budget=self._token_budget,
        )

    def _drafter(self, spec: DraftSpec, name: str) -> Drafter:
        if spec.model is not None:
            return ModelDrafter(self._draft_models[spec.model], self.runner.vocab_size, name)
        return NgramDrafter(**{f"{size}_n": n for size, n in spec.options.items()}, name=name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> list[Output]:
        """Continue each prompt; requests share passes. Outputs come in the order of the prompts.

        Args:
            prompts: text, tokenised as it stands with what the tokenizer itself adds (no chat template), or token ids.
            params: for all prompts, or one for each.
            on_step: called after each pass with what it did.

        Raises:
            PromptError: a prompt is empty, too long or not of this model; nothing is generated then.
        """
        requests = self._add_all(prompts, params)
        try:
            while not all(request.finished for request in requests):
                step = self.engine.step()
                if on_step is not None:
                    on_step(step)
        finally:
            self._abort(requests)
        return [self._output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Continue one prompt, yielding the tokens of each pass as they are committed. Closing the stream ends it."""
        return Stream(self.engine, self._add(prompt, params or SamplingParams()), self.tokenizer)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        """Answer a conversation of {"role", "content"} messages in the model's own chat template."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """`chat`, as a stream."""
        return self.stream(self.encode_chat(messages), params)

    def first_difference(self, plain: Output, other: Output, params: SamplingParams) -> Difference | None:
        """Where two outputs of one prompt part, and whether rounding explains it; None when they are equal.

        Raises:
            ConfigError: sampled outputs without the seed that both were made with cannot be judged.
        """
        if params.temperature > 0.0 and params.seed is None:
            raise ConfigError("sampled outputs can only be compared with the seed that made both: set params.seed")
        prompt, seed = plain.prompt_token_ids, params.seed or 0
        return first_difference(self._loaded.model, prompt, params, seed, plain.token_ids, other.token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands; the tokenizer adds what it always adds (often a BOS token, or nothing)."""
        if not text:
            raise PromptError("the prompt is empty: give some text")
        ids: list[int] = self._text_tokenizer()(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        tokenizer = self._text_tokenizer()
        if not messages:
            raise PromptError("the conversation is empty: give at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise PromptError(f"a message needs 'role' and 'content', this is not one: {str(message)[:80]}")
        if not tokenizer.chat_template:
            raise PromptError("this model has no chat template: give plain text to generate instead")
        try:
            ids: list[int] = tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except Exception as problem:  # a template may raise whatever it likes, about roles it does not know for one
            raise PromptError(
                f"the model's chat template refuses this conversation ({first_line(problem)})"
            ) from problem
        return ids

    def _text_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise PromptError("this LLM has no tokenizer: give token ids, or LLM(model, tokenizer=...)")
        return self.tokenizer

    def _add_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        many: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ConfigError(f"{len(params)} sampling parameters for {len(many)} prompts: give one, or one for each")
        requests: list[Request] = []
        try:
            for prompt, chosen in zip(many, params, strict=True):
                requests.append(self._add(prompt, chosen))
        except BaseException:
            self._abort(requests)
            raise
        return requests

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return self.engine.add(ids, params, self._fresh_seed() if params.seed is None else params.seed)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _output(self, request: Request) -> Output:
        if request.finish_reason is None:
            raise RuntimeError(f"request {request.id} has not finished")
        ids = request.output
        text = decode(self.tokenizer, ids) if self.tokenizer is not None else ""
        return Output(request.tokens[: request.prompt_len], ids, text, request.finish_reason, request.stats)


def load_draft_model(name: str, target: Loaded) -> Any:
    """A runner for a draft model that shares the target's vocabulary, in the target's dtype and on its device.

    Raises:
        ModelError: it cannot be had, or its tokens are not the target's.
    """
    draft = load(name, target.model.dtype, target.model.device)
    check_same_vocabulary(name, draft, target)
    return load_runner(draft.model)


def _load_target(model: Any, tokenizer: Any, dtype: str | torch.dtype, device: str | torch.device) -> Loaded:
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError("a tokenizer comes with a named model: drop tokenizer=, or give the loaded model")
        loaded = load(model, dtype, device)
        if loaded.tokenizer is None:
            raise ModelError(f"{model} has no tokenizer beside it: save one there, or give a loaded model")
        return loaded
    if dtype != "auto" or device != "auto":
        raise ConfigError("a loaded model keeps its dtype and device: drop dtype= and device=, or convert it before")
    path = Path(getattr(model, "name_or_path", None) or "")
    return Loaded(model, tokenizer, path if (path / "config.json").exists() else None)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
