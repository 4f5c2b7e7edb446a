"""Shared history: what it keeps and forgets, its file, and that nobody gets it without asking."""

import gc
import logging
import random
import stat
import subprocess
import sys
import tracemalloc
import weakref
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bozza import LLM, SamplingParams
from bozza.core import Request
from bozza.drafters import history as history_module
from bozza.drafters import history_file
from bozza.drafters.chains import ORDERS, RECENT
from bozza.drafters.history import BLOCK, SAVE_EVERY, SharedHistory
from bozza.drafters.suffix import HALF, SuffixDrafter
from bozza.errors import ConfigError
from tiny import token_prompts

TEXT = list(range(100, 132))  # two blocks


def request(prompt, output=(), id_=0):
    return Request(id_, [*prompt, *output], len(prompt), SamplingParams(), 0, frozenset(), 10_000)


def serve(drafter, prompt, output, id_=0):
    """A request from its start to its end."""
    asked = request(prompt, id_=id_)
    drafter.start(asked)
    for token in output:
        asked.tokens.append(token)
        drafter.observe(asked, [token])
    drafter.stop(asked)


def draft(drafter, prompt, nodes=4, id_=9):
    asked = request(prompt, id_=id_)
    drafter.start(asked)
    return drafter.draft([asked], [nodes])[0]


def text(number, length=2 * BLOCK):
    """Tokens that no other number's text has."""
    return list(range(1000 * number, 1000 * number + length))


def kept(history, number):
    return bool(history.find(text(number)[:4]))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# What a request gets


def test_without_a_history_no_request_sees_another():
    drafter = SuffixDrafter()
    serve(drafter, [1], TEXT)
    assert len(draft(drafter, TEXT[:9])) == 0


def test_with_a_history_an_ended_output_is_continued():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, [1], TEXT)
    assert draft(drafter, TEXT[:9]).tokens == tuple(TEXT[9:13])


def test_only_the_output_is_kept():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, TEXT, [7, 8, 9])
    assert len(draft(drafter, TEXT[:9])) == 0
    assert draft(drafter, [7, 8]).tokens == (9,)


def test_a_running_request_is_not_seen_yet():
    drafter = SuffixDrafter(history=SharedHistory())
    running = request([1], TEXT)
    drafter.start(running)
    assert len(draft(drafter, TEXT[:9])) == 0
    drafter.stop(running)
    drafter.stop(running)  # an abort after the end changes nothing
    assert len(draft(drafter, TEXT[:9])) == 4


def test_a_copy_ends_where_the_kept_output_does():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, [1], TEXT)
    assert draft(drafter, TEXT[:-2], nodes=6).tokens == tuple(TEXT[-2:])


def test_the_longer_match_decides():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, [1], [5, 6, 7, 8, 20])
    assert draft(drafter, [6, 7, 8, 30, 5, 6, 7, 8]).paths() == [(20,)]  # 3 here, 4 there
    first, *_ = here = draft(drafter, [4, 5, 6, 7, 8, 30, 4, 5, 6, 7, 8]).paths()  # 5 here, 4 there
    assert first == (30,)
    assert (20,) not in here


def test_equal_matches_vote_together():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, [1], [6, 7, 8, 20])
    tree = draft(drafter, [3, 6, 7, 8, 30, 2, 6, 7, 8])
    assert [path for path in tree.paths() if len(path) == 1] == [(30,), (20,)]
    assert tree.confidences[0] == pytest.approx(0.5 * 3 / 4)


def test_neither_side_outvotes_the_other_by_number():
    drafter = SuffixDrafter(history=SharedHistory())
    serve(drafter, [1], [6, 7, 20])
    own = [token for _ in range(RECENT) for token in (3, 6, 7, 30)]
    tree = draft(drafter, [*own, 2, 6, 7], nodes=20)
    by_path = dict(zip(tree.paths(), tree.confidences, strict=True))
    assert by_path[(30,)] == pytest.approx(HALF / (HALF + 1) * 2 / 3)
    assert by_path[(20,)] == pytest.approx(1 / (HALF + 1) * 2 / 3)


# What is kept


def test_least_recently_used_goes_first():
    history = SharedHistory(6 * BLOCK)
    for number in (1, 2, 3):
        history.add(text(number))
    history.add(text(4))
    assert [kept(history, number) for number in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_draft_counts_as_use():
    history = SharedHistory(6 * BLOCK)
    for number in (1, 2, 3):
        history.add(text(number))
    drafter = SuffixDrafter(history=history)
    for number in (2, 1):
        assert len(draft(drafter, text(number)[:4])) == 4
    history.add(text(4))
    history.add(text(5))
    assert [kept(history, number) for number in (1, 2, 3, 4, 5)] == [True, False, False, True, True]


def test_a_match_that_loses_to_the_requests_own_text_is_no_use():
    history = SharedHistory(4 * BLOCK)
    history.add(text(1))
    history.add(text(2))
    drafter = SuffixDrafter(history=history)
    draft(drafter, [9, *text(1)[:4], 7, 9, *text(1)[:4]])
    history.add(text(3))
    assert not kept(history, 1)


def test_an_output_that_comes_again_is_kept_once_and_counts_as_used():
    history = SharedHistory(4 * BLOCK)
    history.add(text(1))
    history.add(text(2))
    history.add(text(1))
    assert len(history) == 4 * BLOCK
    assert len(history.find(text(1)[:4])) == 1
    history.add(text(3))
    assert [kept(history, number) for number in (1, 2, 3)] == [True, False, True]


def test_of_an_output_that_is_too_long_the_end_is_kept():
    history = SharedHistory(2 * BLOCK)
    history.add(text(1, 5 * BLOCK))
    assert len(history) == 2 * BLOCK
    assert not history.find(text(1)[:4])
    assert history.find(text(1, 5 * BLOCK)[-6:-2])[0].match == 4


@given(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=40), max_size=12), st.integers(1, 5), st.randoms())
def test_the_index_knows_what_is_kept_and_nothing_else(outputs, blocks, rng):
    history = SharedHistory(blocks * BLOCK)
    for output in outputs:
        history.add(output)
        assert len(history) <= blocks * BLOCK
        entries = [list(entry.tokens) for entry in history._entries.values()]
        for tokens in [*outputs, [rng.randrange(6) for _ in range(5)]]:
            found = history.find(tokens) if tokens else []
            assert all(list(place.text) in entries for place in found)
            assert all(list(p.text[p.end - p.match : p.end]) == tokens[-p.match :] for p in found)
            known = any(tokens[-1:] == [token] for entry in entries for token in entry[:-1])
            assert bool(found) == bool(tokens and known)


def test_outputs_are_forgotten_in_any_order():
    """From the middle of a chain, then from its far end."""
    history = SharedHistory(3 * BLOCK)
    for number in (1, 2, 3):
        history.add([7, number])
    history.use(history.find([7])[2:])  # the first one; now the second is the oldest, then the third
    history.use(history.find([7])[:1])  # the third; now the second, then the first
    left = []
    for number in (4, 5):
        history.add([8, number])
        left.append([place.ahead(1) for place in history.find([7])])
    assert left == [[[3], [1]], [[3]]]


def test_matches_shorter_than_wanted_are_not_looked_for():
    history = SharedHistory()
    history.add([1, 2, 3, 4, 5])
    assert history.find([9, 2, 3], 2)[0].match == 2
    assert not history.find([9, 2, 3], 4)


def test_nothing_is_left_of_what_was_forgotten():
    """Many more outputs than fit: links, blocks and memory stay as they were once it was full."""
    rng = random.Random(0)
    history = SharedHistory(64 * BLOCK)

    def fill():
        for _ in range(200):
            history.add([rng.randrange(50) for _ in range(rng.randrange(2, 60))])
            history.use(history.find([rng.randrange(50)])[-2:])  # so that not the oldest is always the first to go
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    sizes = [fill() for _ in range(4)]
    tracemalloc.stop()
    assert max(sizes[1:]) - min(sizes[1:]) < 8_000
    assert len(history._owners) <= 64
    in_use = {block for entry in history._entries.values() for block in entry.blocks}
    assert in_use.isdisjoint(history._free)
    assert len(in_use) + len(history._free) == len(history._owners)
    for order, heads, older in zip(ORDERS, history._chains._heads, history._chains._older, strict=True):
        linked = []
        for place in heads:
            while place >= 0:
                linked.append(place)
                assert len(linked) <= 64 * BLOCK
                place = older[place]
        entries = history._entries.values()
        expected = [history_module._place(entry, end) for entry in entries for end in range(order, len(entry.tokens))]
        assert sorted(linked) == sorted(expected)  # each once, in one chain


def test_a_forgotten_output_is_gone_at_once():
    history = SharedHistory(4 * BLOCK)
    history.add(text(1))
    history.add(text(2))
    forgotten = weakref.ref(next(iter(history._entries.values())).tokens)
    history.add(text(3, BLOCK))  # takes one of its two blocks
    gc.collect()
    assert forgotten() is None


def test_memory_is_what_the_docs_say():
    rng = random.Random(0)
    tracemalloc.start()
    history = SharedHistory(1 << 14)
    for _ in range(40):
        history.add([rng.randrange(50_000) for _ in range(1 << 9)])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(history) == 1 << 14
    assert size < (60 + 4) * (1 << 14) + 500 * len(history._entries)


def test_a_history_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 16"):
        SharedHistory(BLOCK - 1)


# The file


def test_the_file_brings_back_what_was_kept_and_its_order(tmp_path):
    file = tmp_path / "history"
    first = SharedHistory(6 * BLOCK, file, "a model")
    for number in (1, 2, 3):
        first.add(text(number))
    first.use(first.find(text(1)[:4]))
    first.save()
    again = SharedHistory(6 * BLOCK, file, "a model")
    assert again.find(text(2)[:4])[0].ahead(3) == text(2)[4:7]
    again.add(text(4))
    assert [kept(again, number) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert [kept(SharedHistory(2 * BLOCK, file, "a model"), number) for number in (1, 2, 3)] == [True, False, False]


def test_it_is_written_now_and_then_not_each_time(tmp_path):
    file, clock = tmp_path / "history", Clock()
    history = SharedHistory(file=file, clock=clock)
    history.add(text(1))
    assert not file.exists()
    clock.now = SAVE_EVERY
    history.add(text(2))
    written = file.read_bytes()
    history.add(text(3))
    assert file.read_bytes() == written
    assert [kept(SharedHistory(file=file), number) for number in (1, 2, 3)] == [True, True, False]


def test_what_is_not_written_yet_is_written_when_it_is_dropped(tmp_path):
    file = tmp_path / "history"
    history = SharedHistory(file=file)
    history.add(text(1))
    del history
    gc.collect()
    assert kept(SharedHistory(file=file), 1)


def test_what_is_written_is_not_written_again(tmp_path):
    """Otherwise a file that somebody deleted would come back."""
    file = tmp_path / "history"
    history = SharedHistory(file=file)
    history.add(text(1))
    history.save()
    file.unlink()
    del history
    gc.collect()
    assert not file.exists()


def test_what_is_not_written_yet_is_written_at_exit(tmp_path):
    code = (
        "import sys; from bozza.drafters.history import SharedHistory as S; h = S(file=sys.argv[1]); h.add([1, 2, 3])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "history")], check=True)
    assert SharedHistory(file=tmp_path / "history").find([1, 2])


def test_others_cannot_read_the_file(tmp_path):
    history = SharedHistory(file=tmp_path / "history")
    history.add(text(1))
    history.save()
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, caplog):
    file, clock = tmp_path / "history", Clock()
    history = SharedHistory(file=file, clock=clock)
    history.add(text(1))
    history.save()
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history_file.os, "fsync", full)
    history.add(text(2))
    with pytest.raises(ConfigError, match="No space left on device"):
        history.save()
    clock.now = SAVE_EVERY
    with caplog.at_level(logging.WARNING):
        history.add(text(3))  # in the middle of serving: said, not raised
    assert "No space left" in caplog.text
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.undo()
    history.save()
    assert kept(SharedHistory(file=file), 3)


def test_the_file_is_never_seen_half_written(tmp_path, monkeypatch):
    """Until the new one is complete, the old one stands under the name."""
    file = tmp_path / "history"
    history = SharedHistory(file=file)
    history.add(text(1))
    history.save()
    before, seen = file.read_bytes(), []
    monkeypatch.setattr(history_file.os, "fsync", lambda descriptor: seen.append(file.read_bytes()))
    history.add(text(2))
    with file.open("rb") as reader:
        history.save()
        assert reader.read() == before
    assert seen == [before]
    assert file.read_bytes() != before


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    history = SharedHistory(file=tmp_path / "link")
    history.add(text(1))
    history.save()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").is_file()


def test_another_models_file_is_refused(tmp_path):
    history = SharedHistory(file=tmp_path / "history", identity="one model")
    history.add(text(1))
    history.save()
    with pytest.raises(ConfigError, match=r"another model \(one model, this one is other\): name another file"):
        SharedHistory(file=tmp_path / "history", identity="other")


@pytest.mark.parametrize("damage", ["cut", "flip", "more", "empty body"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    file = tmp_path / "history"
    history = SharedHistory(file=file)
    history.add(text(1))
    history.save()
    data = file.read_bytes()
    middle = len(data) - 60
    file.write_bytes(
        {
            "cut": data[:-1],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "more": data + b"\0\0\0\0",
            "empty body": data[: data.index(b"\n") + 1],
        }[damage]
    )
    with pytest.raises(ConfigError, match="is damaged: delete it"):
        SharedHistory(file=file)


@pytest.mark.parametrize("content", [b"", b"# My notes\n", b"\xff\xfe\n", b"[1]\n", b'{"format": "other"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    file = tmp_path / "notes.md"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is no history file: it stays as it is"):
        SharedHistory(file=file)
    assert file.read_bytes() == content


def test_a_file_of_another_format_is_refused(tmp_path):
    file = tmp_path / "history"
    file.write_bytes(b'{"format": "bozza-history", "version": 2, "identity": ""}\n')
    with pytest.raises(ConfigError, match="has format 2, this version reads 1"):
        SharedHistory(file=file)


def test_places_where_no_file_can_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        SharedHistory(file=tmp_path / "missing" / "history")
    with pytest.raises(ConfigError, match="cannot be written"):
        SharedHistory(file=tmp_path)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=5))
def test_the_format_holds_any_tokens(tmp_path_factory, outputs):
    file = tmp_path_factory.mktemp("format") / "history"
    history_file.write(file, "é\n", [array("i", output) for output in outputs])
    assert [list(entry) for entry in history_file.read(file, "é\n")] == outputs


# LLM


PROMPTS = token_prompts(6)
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


def passes(outputs):
    return sum(out.stats.passes for out in outputs)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_llm_copies_from_earlier_outputs_only_if_asked_and_says_the_same(target, rule):
    plain = [out.token_ids for out in LLM(target, policy="off").generate(PROMPTS, LONG)]
    for shared in (False, True):
        llm = LLM(target, policy="fixed", draft=["suffix"], rule=rule, shared_history=shared)
        first, second = (llm.generate(PROMPTS, LONG) for _ in range(2))
        assert [out.token_ids for out in first] == [out.token_ids for out in second] == plain
        assert (passes(second) < 0.7 * passes(first)) == shared
        assert (passes(second) == passes(first)) != shared


def test_twins_share_the_history(target):
    llm = LLM(target, policy="fixed", draft=["suffix"], shared_history=True)
    first = llm.generate(PROMPTS, LONG)
    twin = llm.with_policy("fixed", ["suffix:k=12"])
    assert twin.shared_history is llm.shared_history
    assert passes(twin.generate(PROMPTS, LONG)) < passes(first)


def test_a_file_carries_the_history_to_the_next_llm_of_this_model(target, folders, tmp_path):
    file = tmp_path / "history"
    llm = LLM(folders["target"], policy="fixed", draft=["suffix"], shared_history=file)
    first = llm.generate(PROMPTS, LONG)
    llm.shared_history.save()
    again = LLM(folders["target"], policy="fixed", draft=["suffix"], shared_history=str(file))
    assert passes(again.generate(PROMPTS, LONG)) < passes(first)
    with pytest.raises(ConfigError, match="belongs to another model"):
        LLM(folders["shallow"], policy="fixed", draft=["suffix"], shared_history=file)


@pytest.mark.parametrize("options", [{"draft": ["ngram"]}, {"policy": "off"}, {}])
def test_a_history_that_nobody_would_use_is_refused_before_a_model_is_loaded(options):
    with pytest.raises(ConfigError, match="only drafter 'suffix' uses a shared history"):
        LLM("/no/model", shared_history=True, **options)


@pytest.mark.parametrize("shared", [1, None, "", 0, ["file"]])
def test_what_is_neither_yes_no_nor_a_file_is_refused(shared):
    with pytest.raises(ConfigError, match="use True, False, or the name of a file"):
        LLM("/no/model", draft=["suffix"], shared_history=shared)


def test_a_wrong_file_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        LLM("/no/model", draft=["suffix"], shared_history=tmp_path / "missing" / "history")
