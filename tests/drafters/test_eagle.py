"""The eagle drafter: what it drafts is what the head says, however the work was divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import eagle3
from bozza import LLM, SamplingParams
from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters import heads
from bozza.drafters.base import Reading
from bozza.drafters.eagle import EagleDrafter
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.heads import save_head
from bozza.models.runner import Row
from bozza.train.unrolled import unroll
from tiny import VOCAB, tiny, tiny_head, token_prompts


@pytest.fixture(autouse=True)
def _all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees as deep as they can be, however unlikely it is that the target gets so far."""
    monkeypatch.setattr("bozza.drafters.heads.LEVEL", 0.0)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_runner_computes_what_training_unrolls() -> None:
    """Slots read in chunks, then a chain of the head's own outputs, against the unrolled form of training."""
    head = tiny_head(tiny("llama").float())
    runner = HeadRunner(head)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 200, (14,), generator=generator)
    features = torch.randn(12, head.fc.in_features, generator=generator)
    steps = unroll(head, tokens[None, 1:], torch.nn.functional.pad(features, (0, 0, 0, 1))[None], 3)

    slot = runner.alloc()
    fused = runner.fuse(features)
    first, _ = runner.forward([HeadRow(Row(slot, tokens[1:8].tolist(), wanted=0), fused[:7])])
    second, _ = runner.forward([HeadRow(Row(slot, tokens[8:11].tolist()), fused[7:10])])
    close(torch.cat([first, second]), steps[0][0, :10])
    chain = Draft.chain(tokens[11:12].tolist(), "")
    third, logits = runner.forward([HeadRow(Row(slot, (), chain, fed=0), second[-1:])])
    close(third, steps[1][0, 10:11])
    close(logits, head.logits(third).float())
    chain = Draft.chain(tokens[11:13].tolist(), "")
    fourth, _ = runner.forward([HeadRow(Row(slot, (), chain, fed=1), third)])
    close(fourth, steps[2][0, 11:12])


class Text:
    """A request and what the target makes of its tokens, shown to a drafter as passes of an engine would."""

    def __init__(self, head: Any, length: int, id_: int = 0, temperature: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(100 + id_)
        self.tokens: list[int] = torch.randint(3, VOCAB, (length + 40,), generator=generator).tolist()
        self.features = torch.randn(length + 40, head.fc.in_features, generator=generator)
        params = SamplingParams(temperature=temperature)
        self.request = Request(id_, self.tokens[:length], length, params, 7 + id_, frozenset(), 10_000)
        self.shown = 0

    def show(self, drafter: EagleDrafter, count: int | None = None, skip: int = 0) -> Text:
        """The next `count` features, or all that the target knows by now; the first ones can be lost."""
        end = len(self.request.tokens) - 1 if count is None else self.shown + count
        hidden = self.features[self.shown + skip : end]
        if len(hidden) == 0:  # no pass without a token
            return self
        drafter.read(self.request, Reading(self.shown + skip, hidden, (), (), lambda rows, most: ([], [])))
        self.shown = end
        return self

    def commit(self, count: int) -> Text:
        have = len(self.request.tokens)
        self.request.tokens += self.tokens[have : have + count]
        return self

    def known(self) -> torch.Tensor:
        return self.features[: len(self.request.tokens) - 1]


@pytest.fixture(scope="module")
def head() -> Any:
    return tiny_head(tiny("llama"))


def started(head: Any, *texts: Text, **options: Any) -> EagleDrafter:
    drafter = EagleDrafter(HeadRunner(head), **options)
    for text in texts:
        drafter.start(text.request)
    return drafter


def drafts_of(drafter: EagleDrafter, texts: list[Text], nodes: int = 7) -> list[Draft]:
    return drafter.draft([text.request for text in texts], [nodes] * len(texts))


def same(one: Draft, other: Draft) -> None:
    assert one == other
    assert one.confidences == pytest.approx(other.confidences, rel=1e-3)
    assert len(one) > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_a_draft_is_the_best_tree_of_the_head_written_out(layers: int) -> None:
    """At the prompt and after each commit, with features of the target in place of what was drafted before."""
    head = tiny_head(tiny("llama"), layers=layers)
    text = Text(head, 9)
    drafter = started(head, text)
    for committed in (0, 1, 4):
        text.commit(committed).show(drafter)
        draft = drafts_of(drafter, [text])[0]
        expected = eagle3.best_tree(head, text.request.tokens, text.known(), 7)
        assert set(draft.paths()) == set(expected)
        assert list(draft.confidences) == pytest.approx([expected[path] for path in draft.paths()], rel=1e-3)
        assert any(depth > 1 for depth in draft.depths())


def test_tokens_that_the_head_cannot_guess_are_never_drafted(head: Any) -> None:
    text = Text(head, 20)
    drafter = started(head, text)
    draft = drafts_of(drafter, [text.show(drafter)], 30)[0]
    assert set(draft.tokens) <= set(head.targets.tolist())
    assert set(draft.drafters) == {"eagle"}


@pytest.mark.parametrize("layers", [1, 2])
def test_a_request_gets_the_same_draft_whatever_shares_its_batch(layers: int) -> None:
    head = tiny_head(tiny("llama"), layers=layers)

    def texts() -> list[Text]:
        return [Text(head, 3 + 9 * id_, id_, temperature=0.8 * (id_ % 2)) for id_ in range(5)]

    together = texts()
    drafter = started(head, *together)
    rounds = []
    for committed in (0, 3, 1):
        for text in together:
            text.commit(committed).show(drafter)
        rounds.append(drafts_of(drafter, together))
    for place, alone in enumerate(texts()):
        drafter = started(head, alone)
        for committed, drafts in zip((0, 3, 1), rounds, strict=True):
            same(drafts[place], drafts_of(drafter, [alone.commit(committed).show(drafter)])[0])


def test_each_request_has_a_budget_of_its_own(head: Any) -> None:
    texts = [Text(head, 5 + id_, id_) for id_ in range(3)]
    drafter = started(head, *texts)
    drafts = drafter.draft([text.show(drafter).request for text in texts], [1, 6, 3])
    assert [len(draft) for draft in drafts] == [1, 6, 3]


def test_long_prompts_are_read_in_chunks_and_drafts_are_the_same(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Text(head, 33), Text(head, 6, 1)]
    drafter = started(head, *texts)
    whole = drafts_of(drafter, [text.show(drafter) for text in texts])
    monkeypatch.setattr(heads, "CHUNK", 5)
    texts = [Text(head, 33), Text(head, 6, 1)]
    drafter = started(head, *texts)
    passes = []
    forward = HeadRunner.forward

    def counted(self: HeadRunner, rows: Any, **options: Any) -> Any:
        passes.append([len(row.hidden) for row in rows if row.row.fed is None])
        return forward(self, rows, **options)

    monkeypatch.setattr(HeadRunner, "forward", counted)
    texts[0].show(drafter, 13).show(drafter)  # as it comes from two passes of the target
    texts[1].show(drafter)
    for draft, expected in zip(drafts_of(drafter, texts), whole, strict=True):
        same(draft, expected)
    assert [counts for counts in passes if counts] == [[5, 5], [5], [5], [5], [5], [5], [2]]


def test_each_feature_is_read_once(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(head, 12)
    drafter = started(head, text)
    read = []
    forward = HeadRunner.forward

    def counted(self: HeadRunner, rows: Any, **options: Any) -> Any:
        read.extend(len(row.hidden) for row in rows if row.row.fed is None)
        return forward(self, rows, **options)

    monkeypatch.setattr(HeadRunner, "forward", counted)
    for committed in (0, 2, 0, 5):
        drafts_of(drafter, [text.commit(committed).show(drafter)])
    assert read == [11, 2, 5]


def test_drafting_again_without_a_pass_between_gives_the_same(head: Any) -> None:
    """As after a step that was interrupted between draft and commit."""
    text = Text(head, 12)
    drafter = started(head, text)
    first = drafts_of(drafter, [text.show(drafter)])[0]
    same(drafts_of(drafter, [text])[0], first)
    text.commit(2).show(drafter)
    fresh = started(head, text)
    text.shown = 0
    same(drafts_of(drafter, [text])[0], drafts_of(fresh, [text.show(fresh)])[0])


@pytest.mark.parametrize("broken", range(6))
def test_a_draft_that_is_interrupted_at_any_pass_has_not_happened(head: Any, broken: int) -> None:
    texts = [Text(head, 12), Text(head, 4, 1)]
    drafter = started(head, *texts)
    expected = drafts_of(drafter, [text.show(drafter) for text in texts])

    texts = [Text(head, 12), Text(head, 4, 1)]
    runner = HeadRunner(head)
    drafter = EagleDrafter(runner)
    for text in texts:
        drafter.start(text.request)
        text.show(drafter)
    forward, calls = runner.forward, []

    def interrupt(*arguments: Any, **options: Any) -> Any:
        result = forward(*arguments, **options)
        calls.append(1)
        if len(calls) == broken + 1:
            raise KeyboardInterrupt
        return result

    runner.forward = interrupt  # type: ignore[method-assign]
    try:
        drafts_of(drafter, texts)
    except KeyboardInterrupt:
        assert len(calls) == broken + 1
    for draft, other in zip(drafts_of(drafter, texts), expected, strict=True):
        same(draft, other)


def test_features_wait_for_a_request_that_is_drafted_for_later(head: Any) -> None:
    late, early = Text(head, 12), Text(head, 12)
    drafter, other = started(head, late), started(head, early)
    for committed in (0, 2, 1, 3):
        late.commit(committed).show(drafter)
        drafts = drafts_of(other, [early.commit(committed).show(other)])
    same(drafts_of(drafter, [late])[0], drafts[0])


def test_without_all_features_there_is_no_draft(head: Any) -> None:
    """Not before the prompt is read, not while a pass is missing, and never again after one was lost."""
    text, whole, short = Text(head, 12), Text(head, 9, 1), Text(head, 1, 2)
    drafter = started(head, text, whole, short)
    whole.show(drafter)
    assert drafts_of(drafter, [text])[0] is NO_DRAFT
    text.show(drafter, 6)
    drafts = drafts_of(drafter, [text, whole, short])
    assert [len(draft) > 0 for draft in drafts] == [False, True, False]
    text.show(drafter)
    assert len(drafts_of(drafter, [text])[0])
    text.commit(1)
    assert drafts_of(drafter, [text])[0] is NO_DRAFT
    text.commit(3).show(drafter, skip=2)
    text.commit(2).show(drafter)
    assert [len(draft) > 0 for draft in drafts_of(drafter, [text, whole])] == [False, True]
    drafter.stop(text.request)


def test_features_that_come_twice_are_read_once(head: Any) -> None:
    text = Text(head, 12)
    drafter = started(head, text)
    first = drafts_of(drafter, [text.show(drafter)])[0]
    text.shown = 6
    same(drafts_of(drafter, [text.show(drafter)])[0], first)


def test_slots_are_given_back_and_hold_nothing_of_the_request_before(head: Any) -> None:
    texts = [Text(head, 5 + id_, id_) for id_ in range(4)]
    runner = HeadRunner(head)
    drafter = EagleDrafter(runner)
    for text in texts:
        drafter.start(text.request)
        drafts_of(drafter, [text.show(drafter)])
    drafter.stop(texts[2].request)
    drafter.stop(texts[2].request)  # twice is no harm
    again = Text(head, 8, 9)
    drafter.start(again.request)
    fresh = started(head, Text(head, 8, 9))
    same(drafts_of(drafter, [again.show(drafter)])[0], drafts_of(fresh, [Text(head, 8, 9).show(fresh)])[0])
    for text in (texts[0], texts[1], texts[3], again):
        drafter.stop(text.request)
    assert runner.alloc() == 0  # the lowest free one
    assert [runner.alloc() for _ in range(3)] == [1, 2, 3]


def test_output_is_the_targets_own(tmp_path: object) -> None:
    model = tiny("llama")

    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)  # type: ignore[arg-type]
    llm = LLM(model, policy="fixed", draft=[f"eagle:{tmp_path},k=12,width=3"])
    prompts, params = token_prompts(6), SamplingParams(max_tokens=20)
    plain = llm.with_policy("off").generate(prompts, params)
    drafted = llm.generate(prompts, params)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert all(out.stats.drafted["eagle"] for out in drafted)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_an_engine_whose_steps_are_interrupted_drafts_on_as_if_they_had_not_been(
    tmp_path: object, temperature: float
) -> None:
    model = tiny("llama")
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=20, temperature=temperature)

    def run(interrupted: bool) -> tuple[list[list[int]], list[Any]]:
        llm = LLM(model, policy="fixed", draft=[f"eagle:{tmp_path},k=6"], token_budget=64)
        requests = [llm.engine.add(prompt, params, seed) for seed, prompt in enumerate(token_prompts(6))]
        verify, steps = llm.engine._rule.verify, 0

        def interrupt(*arguments: Any) -> Any:
            llm.engine._rule.verify = verify  # type: ignore[method-assign]
            raise KeyboardInterrupt

        while not all(request.finished for request in requests):
            steps += 1
            if interrupted and steps % 2:
                llm.engine._rule.verify = interrupt  # type: ignore[method-assign]
                with pytest.raises(KeyboardInterrupt):
                    llm.engine.step()
            llm.engine.step()
        return [r.output for r in requests], [(r.stats.drafted, r.stats.accepted, r.credits) for r in requests]

    assert run(True) == run(False)
    assert sum(drafted["eagle"] for drafted, *_ in run(False)[1]) > 100
