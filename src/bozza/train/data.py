"""Conversations to train on, written by the target itself: a user's turn from its bare chat prefix, then the answer.

Instruction-tuned models write plausible user turns when the template is cut where the user speaks (Xu et al., 2024,
Magpie). Conversation i depends on the seed and on i alone, however the work was batched or interrupted: a run that was
killed goes on where it stopped, and the data is the same as if it had not been.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bozza.core import Request
from bozza.errors import ConfigError, PromptError
from bozza.llm import LLM
from bozza.params import SamplingParams

BATCH = 96  # conversations in flight
FRUITLESS = 20 * BATCH  # texts without any new conversation, after which more will not help
USER_TOKENS, ANSWER_TOKENS = 128, 256  # most of each
USER_TEMPERATURE, USER_TOP_P = 0.9, 0.95
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7)  # one is drawn for each conversation
OPENED = 0.6  # share of the user turns that begin with one of these, for variety; the rest begin from nothing
OPENERS = (
    "Write a short story about", "Write a poem about", "Tell me about", "Describe", "Explain how", "Explain why",
    "What is the difference between", "What are the main", "Why do", "How can I", "How does", "Who was",
    "Write an email to", "Write a blog post about", "Write a speech about", "Give me advice on", "Imagine you are",
    "Summarize the following text:", "Summarize this article:", "Rewrite the following paragraph",
    "Translate the following sentence", "Correct the grammar of", "Answer the question based on the passage.",
    "Write a Python function that", "Write a program that", "Fix the bug in this code:", "Add a docstring to",
    "Write a SQL query", "Make a list of", "Compare", "Create a plan for", "Classify", "Extract the names from",
    "A farmer has", "A store sells", "A train travels", "A baker makes", "A teacher has", "There are",
    "Tom has", "Maria buys", "John earns", "Sarah has twice as many", "Every day, Anna", "In a class of",
    "If a box holds", "How many", "Solve the equation", "Calculate the area of", "What is the probability that",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of a prompt and its answer; the answer begins at `prompt_len`. Without tokens: one that was dropped."""

    index: int
    prompt_len: int
    tokens: tuple[int, ...]


class ConversationFile:
    """Conversations on disk, a line of JSON each, in the order in which they were finished.

    Args:
        path: the file; it and its folder are made when they do not exist.
        origin: what the conversations depend on; a file of another origin is refused.

    Raises:
        ConfigError: the file has another origin.
    """

    def __init__(self, path: Path, origin: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[int, Conversation] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a line that was cut off is written again
        if not whole:
            whole = json.dumps(origin) + "\n"
        if whole != text:
            path.write_text(whole)
        first, *lines = whole.splitlines()
        if (other := json.loads(first)) != origin:
            differing = sorted(key for key in {*other, *origin} if other.get(key) != origin.get(key))
            raise ConfigError(
                f"{path} was made with another {' and '.join(differing)}: use another folder, or delete the file"
            )
        for line in lines:
            index, prompt_len, tokens = json.loads(line)
            self.found[index] = Conversation(index, prompt_len, tuple(tokens))

    def add(self, conversation: Conversation) -> None:
        """Append one, at once."""
        self.found[conversation.index] = conversation
        with self.path.open("a") as file:
            file.write(json.dumps([conversation.index, conversation.prompt_len, conversation.tokens]) + "\n")

    def dataset(self, tokens: int | None = None) -> list[Conversation]:
        """The first conversations without a gap that hold `tokens` tokens together, or all; no user turn twice."""
        chosen: dict[tuple[int, ...], Conversation] = {}
        total = 0
        for index in range(len(self.found)):
            conversation = self.found.get(index)
            if conversation is None or (tokens is not None and total >= tokens):
                break
            key = conversation.tokens[: conversation.prompt_len]
            if key and key not in chosen:
                chosen[key] = conversation
                total += len(conversation.tokens)
        return list(chosen.values())


class Synthesis:
    """Lets a target write conversations.

    Args:
        llm: the target with policy "off".
        seed: decides every conversation.
        prompts: user turns to answer; without them the target writes its own.

    Raises:
        PromptError: the model has no chat template.
    """

    def __init__(self, llm: LLM, seed: int, prompts: Sequence[str] | None = None) -> None:
        self._llm = llm
        self._seed = seed
        self._prompts = prompts
        self._prefix = "" if prompts is not None else _user_prefix(llm)

    def run(self, file: ConversationFile, tokens: int, on_progress: Callable[[int], None] = lambda done: None) -> None:
        """Write conversations until the file's dataset holds `tokens` tokens, or the prompts are used up.

        Raises:
            ConfigError: nothing new comes.
        """
        live: dict[int, tuple[Request, int, bool]] = {}  # request id -> request, index, whether it is the answer
        indices = self._indices(file)
        engine = self._llm.engine
        missing = self._missing(file, tokens)
        fruitless = 0  # conversations since the dataset last grew
        try:
            while missing > 0:
                while len(live) < BATCH and (index := next(indices, None)) is not None:
                    request = self._begin(index)
                    live[request.id] = (request, index, self._prompts is not None)
                if not live:
                    return
                engine.step()
                finished = [each for each in live.values() if each[0].finished]
                for request, index, answers in finished:
                    del live[request.id]
                    if not answers and (answer := self._answer(request, index)):
                        live[answer.id] = (answer, index, True)
                    else:
                        file.add(_conversation(request, index, answers))
                if finished:
                    before, missing = missing, self._missing(file, tokens)
                    fruitless = 0 if missing < before else fruitless + len(finished)
                    on_progress(tokens - missing)
                if fruitless > FRUITLESS:
                    raise ConfigError(
                        f"the last {fruitless} texts gave no new conversation (user turns that do not end, or repeat): "
                        "give --prompts FILE"
                    )
        finally:
            for request, *_ in live.values():
                engine.abort(request)

    def _missing(self, file: ConversationFile, tokens: int) -> int:
        return tokens - sum(len(conversation.tokens) for conversation in file.dataset(tokens))

    def _indices(self, file: ConversationFile) -> Iterator[int]:
        index = 0
        while self._prompts is None or index < len(self._prompts):
            if index not in file.found:
                yield index
            index += 1

    def _chance(self, index: int) -> random.Random:
        return random.Random(f"{self._seed}/{index}")

    def _begin(self, index: int) -> Request:
        if self._prompts is not None:
            return self._ask(self._prompts[index], index)
        chance = self._chance(index)
        opener = chance.choice(OPENERS) if chance.random() < OPENED else ""
        params = SamplingParams(temperature=USER_TEMPERATURE, top_p=USER_TOP_P, max_tokens=USER_TOKENS)
        return self._llm.engine.add(self._llm.encode(self._prefix + opener), params, chance.getrandbits(63))

    def _answer(self, request: Request, index: int) -> Request | None:
        """The request for the answer to a user's turn, if that turn is a whole one."""
        prefix = len(self._llm.encode(self._prefix))
        text = self._llm.tokenizer.decode(request.tokens[prefix:], skip_special_tokens=True).strip()
        return self._ask(text, index) if text and request.finish_reason == "stop" else None

    def _ask(self, text: str, index: int) -> Request:
        chance = self._chance(index)
        params = SamplingParams(temperature=chance.choice(ANSWER_TEMPERATURES), max_tokens=ANSWER_TOKENS)
        prompt = self._llm.encode_chat([{"role": "user", "content": text}])
        return self._llm.engine.add(prompt, params, chance.getrandbits(63))


def _conversation(request: Request, index: int, answers: bool) -> Conversation:
    return Conversation(index, request.prompt_len, tuple(request.tokens)) if answers else Conversation(index, 0, ())


def _user_prefix(llm: LLM) -> str:
    """The chat template up to where the user begins to speak."""
    marker = "\N{REPLACEMENT CHARACTER}"
    if not llm.tokenizer.chat_template:
        raise PromptError("the model has no chat template to write user turns from: give --prompts FILE")
    text: str = llm.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return text[: text.index(marker)]
