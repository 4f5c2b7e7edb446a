"""The public face: text in, text out, sooner."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from bozza.core import FinishReason, Request, RequestStats, StepStats, TokenLogprob
from bozza.drafters import Drafter
from bozza.drafters.factory import Factory
from bozza.drafters.history import check_sharing, open_sharing
from bozza.drafters.spec import PAID, DraftSpec, check_drafting, drafter_names, parse_spec
from bozza.engine import Engine
from bozza.engine.scheduler import check_limits
from bozza.errors import ConfigError, PromptError
from bozza.exactness import Difference, first_difference
from bozza.intake import Intake, Message, sample_seed
from bozza.leader import Adaptive, CostModel, Fixed, Leader, Off
from bozza.models.identity import identity
from bozza.models.invariance import branches_agree
from bozza.models.loading import end_ids, load_target
from bozza.models.packing import check_quantize
from bozza.models.probe import load_runner
from bozza.models.runner import RaggedRunner
from bozza.params import SamplingParams
from bozza.rules import RULES
from bozza.stream import Stream
from bozza.study.costs import known_costs
from bozza.text import OutputText, decode
from bozza.verify import PROMPTS, Report, checks_of

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt became.

    `token_ids` holds the end token if there was one; `text` shows no special tokens, and ends before a stop string.
    The log-probabilities are None unless asked for. An output that had to be aborted says why in `error`. With `n` > 1
    the other outputs of the prompt are in `others`.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    others: list[Output] = field(default_factory=list)

    @property
    def samples(self) -> list[Output]:
        """All outputs of the prompt, this one first."""
        return [self, *self.others]


class LLM:
    """A target model with its drafters, ready to generate.

    Args:
        model: an alias ("smollm2"), a folder, a .gguf file, a hub id, or a loaded transformers model (which is put into
            evaluation mode and otherwise left as it is).
        tokenizer: needed for text when `model` is a loaded one; otherwise it comes with the model.
        draft: drafter specifications, in order of trust: "ngram", "ngram:min=1,max=8,k=10", "model:NAME_OR_FOLDER,k=4".
            The default is "grammar" (forced tokens of structured output), "prediction" (what the user expects) and
            "ngram", or nothing with policy "off".
        policy: "adaptive" drafts and verifies what pays, moment by moment; "fixed" drafts k tokens with every drafter
            at every step; "off" decodes plainly.
        rule: "coupled": one seed gives one text, whatever is drafted; "rejection" and "block": the law of the output is
            the target's, the text depends on the drafts too (see `bozza.rules`). Greedy output is the same under all.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16", "float32", or a torch dtype.
        device: "auto" (a GPU when there is one), "cpu", "cuda", "cuda:1".
        quantize: "int8" for linear layers in 8 bits on a CPU: a smaller model that is sooner done and not quite the
            same; speculation is lossless with respect to it (docs/speed.md tells what it costs).
        compile: compile the layers of a model on a CPU, which takes seconds and a C++ compiler and shortens each pass.
            Its roundings are its own, the same in every pass (docs/speed.md).
        invariant: results must not depend on the shape of a pass, to the last bit, in float32 too (see
            docs/design.md). Drafts are then chains unless attention is compiled, and the machine is tried out when
            the model is loaded. Under the rules with coins sampled text still depends on what was drafted.
        shared_history: drafter "suffix" also copies from earlier outputs of other requests: True for as long as this
            LLM and its twins live, a path to keep them in this file. Off by default, since it can leak what others
            wrote (docs/design.md, "Shared history").
        max_batch: most requests in one pass; more wait.
        token_budget: most tokens in one pass; longer prompts are read in chunks.
        costs: what steps cost here, for policy "adaptive", as `bozza.leader.CostModel.from_document` reads it. Without
            it the stored profile of this setting is used, or this machine is measured, which takes a few seconds.
        trace: told of each decision of policy "adaptive" and what came of it, once per step and request.
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
        policy: str = "adaptive",
        rule: str = "coupled",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantize: str | None = None,
        compile: bool = False,
        invariant: bool = False,
        shared_history: bool | str | Path = False,
        max_batch: int = 32,
        token_budget: int = 512,
        costs: Mapping[str, Any] | None = None,
        trace: Callable[[Mapping[str, Any]], None] | None = None,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        specs = check_drafting(draft, policy, rule)
        check_limits(max_batch, token_budget)
        check_sharing(shared_history, specs)
        check_quantize(quantize)
        loaded = load_target(model, tokenizer, dtype, device, quantize, compile)
        self.tokenizer = loaded.tokenizer
        self.model_path = loaded.path
        self.runner = load_runner(loaded.model, invariant, loaded.compiled)
        self.invariant = invariant
        self._chains_only = invariant and not (self.runner.kernel is not None and branches_agree(self.runner))
        self._loaded = loaded
        self._intake = Intake(loaded.tokenizer, self.runner.vocab_size, end_ids(loaded.model))
        self._fresh_seed = fresh_seed
        self._max_batch, self._token_budget = max_batch, token_budget
        self._costs, self._trace = costs, trace
        vocab_size = self.runner.vocab_size
        self.shared_history = open_sharing(shared_history, lambda: identity(loaded, vocab_size))
        self._factory = Factory(loaded, vocab_size, self.shared_history)
        self._factory.load(specs)
        self._set_policy(specs, policy, rule)

    @property
    def model(self) -> Any:
        """The transformers model of the target."""
        return self._loaded.model

    @property
    def weights(self) -> str:
        """What its linear layers are: "plain", "packed" in an order that this processor reads faster, or "int8"."""
        return self._loaded.weights

    @property
    def compiled(self) -> bool:
        """Whether its layers are compiled."""
        return self._loaded.compiled

    @property
    def name(self) -> str:
        """What to call the target in reports."""
        return self.model_path.name if self.model_path else str(self.model.config.model_type)

    def with_policy(
        self,
        policy: str,
        draft: Sequence[str] | None = None,
        *,
        rule: str | None = None,
        max_batch: int | None = None,
    ) -> LLM:
        """Another LLM over the same loaded models. Draft models must be among those of this one.

        Raises:
            ConfigError: as for `LLM`.
        """
        rule = self.rule if rule is None else rule
        specs = check_drafting(draft, policy, rule)
        twin = self._twin()
        twin._max_batch = self._max_batch if max_batch is None else max_batch
        twin._set_policy(specs, policy, rule)
        return twin

    def with_leader(self, leader: Leader) -> LLM:
        """Another LLM over the same loaded models, in which `leader` decides.

        Its drafters are fresh ones of the same kinds; they share no history.
        """
        twin = self._twin()
        specs = [parse_spec(text) for text in self.draft]
        twin.engine = twin._engine(self._factory.make(specs, RULES[self.rule].coupled, private=True), leader)
        return twin

    def apart(self, max_batch: int) -> LLM:
        """Another LLM over the same weights for measurements: its store is its own and goes with it."""
        twin = self._twin()
        twin.runner = RaggedRunner(self.model, self.invariant, self.runner.kernel)
        twin._max_batch, twin._token_budget = max_batch, max(self._token_budget, 32 * max_batch)
        return twin

    def _twin(self) -> LLM:
        twin = object.__new__(LLM)
        twin.__dict__.update(self.__dict__)
        return twin

    def _set_policy(self, specs: Sequence[DraftSpec], policy: str, rule: str) -> None:
        self.policy, self.rule, self.draft = policy, rule, tuple(spec.text for spec in specs)
        tokens = {name: spec.tokens for name, spec in zip(drafter_names(specs), specs, strict=True)}
        leader: Leader = Off()
        if policy == "fixed":
            leader = Fixed(tokens)
        elif policy == "adaptive":
            paid = {name for name, spec in zip(tokens, specs, strict=True) if spec.kind in PAID}
            known = known_costs(self.with_policy("fixed", self.draft)) if self._costs is None else self._costs
            leader = Adaptive(tokens, paid, CostModel.from_document(known), log=self._trace)
        self.engine = self._engine(self._factory.make(specs, RULES[rule].coupled), leader)

    def _engine(self, drafters: Sequence[Drafter], leader: Leader) -> Engine:
        return Engine(
            self.runner,
            drafters,
            RULES[self.rule](),
            leader,
            end_ids=end_ids(self.model),
            chains_only=self._chains_only,
            max_running=self._max_batch,
            token_budget=self._token_budget,
        )

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
        groups = self._add_all(prompts, params)
        requests = [request for group in groups for request in group]
        try:
            while not all(request.finished for request in requests):
                step = self.engine.step()
                if on_step is not None:
                    on_step(step)
        finally:
            self._abort(requests)
        outputs = [[self._output(request) for request in group] for group in groups]
        return [replace(first, others=others) for first, *others in outputs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Continue one prompt, yielding the tokens of each pass as they are committed. Closing the stream ends it.

        Raises:
            PromptError: as for `generate`.
            ConfigError: several outputs are asked for.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError(f"a stream is one output, n is {params.n}: use generate, or one stream for each")
        return Stream(self.engine, self._add(prompt, params)[0], self.tokenizer)

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
        fresh = self._requests(plain.prompt_token_ids, params, params.seed or 0)[0]
        return first_difference(self.model, fresh, plain.token_ids, other.token_ids)

    def verify(
        self,
        prompts: Sequence[Prompt] | None = None,
        *,
        tokens: int = 64,
        samples: int = 2048,
        on_check: Callable[[str], None] = lambda name: None,
    ) -> Report:
        """Check, with these drafters on this machine, that speculation changes nothing (see `bozza.verify`).

        Args:
            prompts: what to continue; a few texts are built in.
            tokens: length of each output.
            samples: least number of sampled tokens for each test of a law.
            on_check: told the name of each check before it runs.

        Raises:
            ConfigError: the policy is "off".
            PromptError: a prompt is of no use, or has no room for so many tokens.
        """
        if isinstance(prompts, str):
            raise PromptError("prompts are a list: write [prompt]")
        ids = [self._ids(prompt) for prompt in (PROMPTS if prompts is None else prompts)]
        for prompt in ids:
            self.engine.check_prompt(prompt)
            if len(prompt) + tokens > self.runner.context_length:
                raise PromptError(
                    f"a prompt of {len(prompt)} tokens has no room for {tokens} more in a context of "
                    f"{self.runner.context_length}: shorten it, or ask for fewer tokens"
                )
        return Report(list(checks_of(self, ids, tokens=tokens, samples=samples, on_check=on_check)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands; the tokenizer adds what it always adds (often a BOS token, or nothing)."""
        return self._intake.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        return self._intake.encode_chat(messages)

    def _add_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[list[Request]]:
        if not isinstance(prompts, Sequence):
            raise PromptError(f"a prompt is a text or a list of token ids, this is {type(prompts).__name__}")
        many: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ConfigError(f"{len(params)} sampling parameters for {len(many)} prompts: give one, or one for each")
        groups: list[list[Request]] = []
        try:
            for prompt, chosen in zip(many, params, strict=True):
                groups.append(self._add(prompt, chosen))
        except BaseException:
            self._abort([request for group in groups for request in group])
            raise
        return groups

    def _add(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Queue the requests of one prompt: one for each output."""
        ids = self._ids(prompt)
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling parameters are SamplingParams(...), this is {type(params).__name__}")
        seed = self._fresh_seed() if params.seed is None else params.seed
        requests = self._requests(ids, params, seed)
        for request in requests:
            self.engine.submit(request)
        return requests

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        if not isinstance(prompt, Sequence) or not all(isinstance(token, Integral) for token in prompt):
            raise PromptError(f"a prompt is a text or a list of token ids, this is not one: {str(prompt)[:80]}")
        return [int(token) for token in prompt]

    def _requests(self, ids: Sequence[int], params: SamplingParams, seed: int) -> list[Request]:
        return [
            self.engine.request(ids, params, sample_seed(seed, index), **self._intake.extras(params))
            for index in range(params.n)
        ]

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _output(self, request: Request) -> Output:
        if request.finish_reason is None:
            raise RuntimeError(f"request {request.id} has not finished")
        ids = request.output
        texts = [watch for watch in request.watches if isinstance(watch, OutputText)]
        text = decode(self.tokenizer, ids) if self.tokenizer is not None else ""
        return Output(
            request.tokens[: request.prompt_len],
            ids,
            texts[0].finish() if texts else text,
            request.finish_reason,
            request.stats,
            None if request.params.logprobs is None else request.logprobs,
            None if request.params.prompt_logprobs is None else request.prompt_logprobs,
            None if request.constraint is None else request.constraint.failure,
        )


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
