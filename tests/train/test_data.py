"""Conversations depend on the seed and their number alone, however the work was divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM
from bozza.errors import ConfigError, PromptError
from bozza.train import data as module
from bozza.train.data import Conversation, ConversationFile, Synthesis
from bozza.train.prompts import read_prompts
from training import talker

ORIGIN = {"model": "tiny", "seed": 0, "prompts": None}


@pytest.fixture(scope="module")
def llm(byte_tokenizer: Any) -> LLM:
    return LLM(talker(), tokenizer=byte_tokenizer, policy="off", token_budget=256)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(module, "USER_TOKENS", 12)
    monkeypatch.setattr(module, "BATCH", 8)


def written(llm: LLM, path: Path, tokens: int = 300, seed: int = 0, prompts: Any = None) -> ConversationFile:
    file = ConversationFile(path, ORIGIN | {"seed": seed})
    Synthesis(llm, seed, prompts).run(file, tokens)
    return file


def test_a_target_writes_whole_conversations_by_itself(llm: LLM, tmp_path: Path) -> None:
    file = written(llm, tmp_path / "data" / "file.jsonl", 500)
    data = file.dataset(500)
    assert 500 <= sum(len(each.tokens) for each in data) < 500 + 200
    for each in data:
        assert 0 < each.prompt_len < len(each.tokens) <= each.prompt_len + 8
        text = llm.tokenizer.decode(each.tokens[: each.prompt_len])
        assert text.startswith("user: ")
        assert text.endswith("\nassistant:")
    texts = [llm.tokenizer.decode(each.tokens) for each in data]
    begun = [any(text.startswith(f"user: {opener}") for opener in module.OPENERS) for text in texts]
    assert any(begun)
    assert not all(begun)
    assert llm.engine.idle
    assert any(not each.tokens for each in file.found.values())  # turns without an end were dropped


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_conversation_does_not_depend_on_what_is_written_beside_it(
    llm: LLM, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(llm, tmp_path / "other.jsonl").dataset(300)
    monkeypatch.setattr(module, "BATCH", batch)
    assert written(llm, tmp_path / "file.jsonl").dataset(300) == expected
    assert len(expected) > 3


def test_a_run_that_was_killed_goes_on_and_gives_the_same_data(llm: LLM, tmp_path: Path) -> None:
    expected = written(llm, tmp_path / "other.jsonl").dataset(300)
    path = tmp_path / "file.jsonl"
    for _ in range(3):
        file = ConversationFile(path, ORIGIN)
        before = dict(file.found)

        def kill(done: int, file: ConversationFile = file, least: int = len(before) + 2) -> None:
            if len(file.found) >= least:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Synthesis(llm, 0).run(file, 300, kill)
        assert llm.engine.idle  # what was in flight has been let go
        assert ConversationFile(path, ORIGIN).found == file.found
        assert before.items() < file.found.items()
    assert written(llm, path).dataset(300) == expected
    lines = [json.loads(line)[0] for line in path.read_text().splitlines()[1:]]
    assert len(set(lines)) == len(lines)  # nothing was written twice


def test_more_data_begins_with_the_same_and_enough_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    less = written(llm, path, 300).dataset(300)
    text = path.read_text()
    written(llm, path, 300)
    assert path.read_text() == text
    more = written(llm, path, 500).dataset(500)
    assert more[: len(less)] == less
    assert len(more) > len(less)


def test_another_seed_gives_other_conversations(llm: LLM, tmp_path: Path) -> None:
    first, second = (written(llm, tmp_path / f"{seed}.jsonl", 300, seed).dataset(300) for seed in (0, 1))
    assert not {each.tokens for each in first} & {each.tokens for each in second}


PROMPTS = [f"What is {number} and {number}?" for number in range(12)]


def test_given_prompts_are_answered_in_their_order_until_they_are_used_up(llm: LLM, tmp_path: Path) -> None:
    file = written(llm, tmp_path / "file.jsonl", 10**6, prompts=PROMPTS)
    data = file.dataset(10**6)
    assert [each.index for each in data] == list(range(12))
    for prompt, each in zip(PROMPTS, data, strict=True):
        assert list(each.tokens[: each.prompt_len]) == llm.encode_chat([{"role": "user", "content": prompt}])
        assert len(each.tokens) > each.prompt_len
    few = written(llm, tmp_path / "few.jsonl", 100, prompts=PROMPTS).dataset(100)
    assert few == data[: len(few)]
    assert len(few) < 12


def test_a_model_without_a_chat_template_needs_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(PromptError, match=r"no chat template .*: give --prompts FILE"):
        Synthesis(llm, 0)


def conversation(index: int, prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(index, len(prompt), (*prompt, *answer))


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    file = ConversationFile(path, ORIGIN)
    for index in range(3):
        file.add(conversation(index, [5, index], [7, 8]))
    whole = path.read_text()
    for cut in range(len(whole)):
        path.write_text(whole[:cut])
        again = ConversationFile(path, ORIGIN)
        kept = whole[:cut].count("\n")
        assert list(again.found) == list(range(max(kept - 1, 0)))
        for index in range(len(again.found), 3):
            again.add(conversation(index, [5, index], [7, 8]))
        assert path.read_text() == whole


def test_a_file_of_another_origin_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    ConversationFile(path, ORIGIN).add(conversation(0, [5], [6]))
    text = path.read_text()
    with pytest.raises(ConfigError, match=r"file\.jsonl was made with another model and seed: ") as caught:
        ConversationFile(path, {"model": "large", "seed": 1, "prompts": None})
    assert "\n" not in str(caught.value)
    assert path.read_text() == text
    assert len(ConversationFile(path, ORIGIN).found) == 1


def test_the_dataset_is_what_comes_first_without_a_gap_and_no_turn_twice(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path / "file.jsonl", ORIGIN)
    turns = {0: [1, 2], 1: [3], 2: [1, 2], 4: [9], 3: [4, 4]}
    for index, prompt in turns.items():
        file.add(conversation(index, prompt, [8, 8, index]))
    file.add(Conversation(5, 0, ()))  # dropped
    file.add(conversation(7, [6], [6]))  # 6 is still being written
    assert [each.index for each in file.dataset()] == [0, 1, 3, 4]
    assert [each.index for each in file.dataset(5)] == [0]
    assert [each.index for each in file.dataset(6)] == [0, 1]
    file.add(conversation(6, [7], [6]))
    assert [each.index for each in file.dataset()] == [0, 1, 3, 4, 6, 7]


def test_prompts_are_lines_of_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(
        'Tell me.\n\n  \n{"prompt": "Was heißt \\"Entwurf\\"?", "id": 4}\n"a string"\n"He," she said\n{no json}\n',
        encoding="utf-8",
    )
    assert read_prompts(file) == ["Tell me.", 'Was heißt "Entwurf"?', "a string", '"He," she said', "{no json}"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'one\n{"text": "two"}\n', 'line 2: no "prompt"'),
        (b'{"prompt": ""}\n', 'line 1: no "prompt"'),
        (b'{"prompt": 3}\n', 'line 1: no "prompt"'),
        (b"\n \n", "holds no prompts"),
        (b"\xff\xfe\x00", "it is no UTF-8 text"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_files_without_prompts_are_refused_in_a_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_that_never_ends_a_turn_is_given_up_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_TOKENS", 1)
    monkeypatch.setattr(module, "FRUITLESS", 30)
    monkeypatch.setattr(llm.engine, "_end_ids", frozenset())
    with pytest.raises(ConfigError, match=r"gave no new conversation .* give --prompts FILE"):
        written(llm, tmp_path / "file.jsonl")
    assert llm.engine.idle
