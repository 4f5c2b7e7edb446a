"""Draft models with other tokenizers: what they read, what they propose, and what comes out."""

import itertools
import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import enumeration
from bozza import LLM, ModelError, SamplingParams
from bozza.core import Request
from bozza.drafters.model import ModelDrafter
from bozza.drafters.translated import DraftModel, ThroughShared, ThroughText, dialect_for
from bozza.engine import Engine
from bozza.leader import Fixed
from bozza.models.loading import Loaded
from bozza.models.runner import ForwardResult
from bozza.models.translation import LOOSE, Transcript, Translation
from bozza.models.vocabulary import byte_alphabet, read_vocabulary, vocabularies
from bozza.rules import RULES, Block, Rejection
from tiny import tiny
from toy import ToyModel

SENTENCES = [
    "The other morning the other baker asked whether the weather was rather better there than here.",
    "def total(values):\n    return sum(value for value in values)\n",
    "Ein müder Bäcker fährt über die Brücke. 東京は今日も雨です。 🙂🙃👩‍🍳 naïve café",
]
TEXT = SENTENCES[0] + " 🙂👩‍🍳 Über 東京 12345.\n\n" + SENTENCES[1] * 2 + "naïve   café " + SENTENCES[2]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
WHOLE = 10_000  # more ids than any model here has


def trained(sentences, size, specials):
    """A byte-level BPE tokenizer; its special tokens have the first ids, the last of them ends texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1], pad_token=specials[0])
    fast.chat_template = CHATML
    return fast


def sentencepiece():
    """As Llama 2's: "▁" for spaces, one more before a text, <0xNN> for what has no token, and a BOS token."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learned.train_from_iterator(SENTENCES[:2], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: id_ for id_, token in enumerate([*first, *(t for t in model["vocab"] if t != "A")])}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def large():
    """A target's tokenizer."""
    return trained(SENTENCES, 420, ["<pad>", "<tool>", "<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def small():
    """Another one: other merges, other ids."""
    return trained(SENTENCES[1:2], 290, ["<|im_start|>", "<none>", "<|im_end|>"])


@pytest.fixture(scope="module")
def pairs(large, small):
    """Vocabularies of a draft model and a target."""
    views = {"large": read_vocabulary(large, WHOLE), "small": read_vocabulary(small, WHOLE)}
    views["spaced"] = read_vocabulary(sentencepiece(), WHOLE)
    return {(draft, target): (views[draft], views[target]) for draft, target in itertools.permutations(views, 2)}


PAIRS = list(itertools.permutations(("large", "small", "spaced"), 2))


def spell(vocabulary, tokens):
    return b"".join(vocabulary.pieces.get(token, vocabulary.specials.get(token, "").encode()) for token in tokens)


def request(tokens, id_=0, **params):
    return Request(id_, list(tokens), len(tokens), SamplingParams(**params), 7, frozenset(), 10_000)


# Vocabularies


def test_the_alphabet_is_that_of_the_tokenizers_library():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("pair", PAIRS)
def test_any_bytes_come_back(pairs, pair):
    """Whole texts, texts cut inside of characters, and noise."""
    rng = random.Random(0)
    data = TEXT.encode()
    cuts = [sorted(rng.sample(range(len(data)), 2)) for _ in range(200)]
    for part in [data, *(data[a:b] for a, b in cuts), *(rng.randbytes(rng.randrange(30)) for _ in range(200))]:
        for vocabulary in pairs[pair]:
            assert spell(vocabulary, vocabulary.encode(part)) == part


def test_encoding_is_the_tokenizers_own(large, small):
    for tokenizer in (large, small):
        view = read_vocabulary(tokenizer, WHOLE)
        assert view.encode(TEXT.encode()) == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    tokenizer = sentencepiece()
    view = read_vocabulary(tokenizer, WHOLE)
    assert [1, *view.encode(b" " + TEXT.encode())] == tokenizer(TEXT)["input_ids"]
    assert view.opening == (1,)
    assert view.spaced
    assert view.roles == {"eos": 2, "bos": 1}
    assert view.ids[b"A"] == 3 + ord("A")  # there is only the byte
    assert view.ids[b"e"] > 3 + 256  # there are both


def test_a_control_token_that_is_spelled_out_is_text(large):
    before = large("<|im_end|>")["input_ids"]
    view = read_vocabulary(large, WHOLE)
    assert not set(view.encode(b"<|im_end|>")) & set(view.specials)
    assert large("<|im_end|>")["input_ids"] == before == [3]  # the user's tokenizer is left alone


def test_ids_that_the_model_has_not_are_no_tokens(large):
    view = read_vocabulary(large, 300)
    assert max(view.pieces) < 300
    assert max(view.ids.values()) < 300


def test_added_tokens_of_ordinary_text_are_pieces():
    tokenizer = letters(*"abc")
    tokenizer.add_tokens(["<b c>", "c  "])
    view = read_vocabulary(tokenizer, 4)
    assert view.pieces == {0: b"a", 1: b"b", 2: b"c", 3: b"<b c>"}
    assert not view.specials
    assert view.encode(b"a<b c>") == [0, 3]


# What the draft model reads


@pytest.mark.parametrize("pair", PAIRS)
def test_the_context_is_the_text_however_it_grew(pairs, pair):
    draft, target = pairs[pair]
    tokens = target.encode(TEXT.encode())
    end = target.roles["eos"]
    tokens = [*tokens, end, *tokens[:40], end, end, *tokens[7:60]]
    transcript, known = Transcript(Translation(draft, target)), []
    retold = 0
    for count in range(1, len(tokens) + 1):
        context, settled = transcript.follow(tokens[:count])
        whole, _ = Transcript(Translation(draft, target)).follow(tokens[:count])
        assert context == whole
        assert context[: len(known)] == known  # what was settled before
        known = context[:settled]
        retold = max(retold, len(context) - settled)
        ends = {spelled.encode(): b"|" for spelled in (target.specials[end], draft.specials[draft.roles["eos"]])}
        said = spell(draft, context[len(draft.opening) :])
        expected = spell(target, tokens[:count])
        for spelled, mark in ends.items():
            said, expected = said.replace(spelled, mark), expected.replace(spelled, mark)
        assert said == (b" " if draft.spaced else b"") + expected.removeprefix(b" " if target.spaced else b"")
    assert retold < 110  # most of it is never tokenised again (東京は... has no spaces)


def test_text_without_spaces_is_settled_too(pairs):
    draft, target = pairs["small", "large"]
    tokens = target.encode(("東京は雨" * 200).encode())
    assert len(tokens) > 2 * LOOSE
    context, settled = Transcript(Translation(draft, target)).follow(tokens)
    assert spell(draft, context) == spell(target, tokens)
    assert 0 < len(context) - settled < 800
    spell(draft, context[:settled]).decode()  # no character is cut


@pytest.mark.parametrize("pair", [("small", "large"), ("spaced", "large")])
def test_a_character_whose_last_bytes_are_missing_is_read_as_bytes(pairs, pair):
    draft, target = pairs[pair]
    data = "ab 🙂".encode()
    tokens = [target.ids[bytes([byte])] for byte in data]
    for count in range(3, len(tokens) + 1):
        context, _ = Transcript(Translation(draft, target)).follow(tokens[:count])
        assert spell(draft, context[len(draft.opening) :]).lstrip() == data[:count].lstrip()


def test_control_tokens_are_the_other_models_own_or_else_text(pairs, large):
    draft, target = pairs["small", "large"]
    chat = large.apply_chat_template([{"role": "user", "content": "hé 🙂"}], add_generation_prompt=True, tokenize=True)
    context, settled = Transcript(Translation(draft, target)).follow([*chat["input_ids"], 1])
    assert spell(draft, context).decode() == "<|im_start|>user\nhé 🙂<|im_end|>\n<|im_start|>assistant\n<tool>"
    assert [token for token in context if token in draft.specials] == [0, 2, 0]  # not <tool>, which it lacks
    assert settled == len(context)


def test_texts_begin_and_end_as_each_model_is_used_to(pairs):
    draft, target = pairs["spaced", "large"]
    context, _ = Transcript(Translation(draft, target)).follow([*target.encode(b"here"), 3])
    assert context == [1, *draft.encode(b" here"), 2]  # <s>, and </s> for <|im_end|>
    draft, target = pairs["large", "spaced"]
    context, _ = Transcript(Translation(draft, target)).follow([1, *target.encode(b" here"), 2])
    assert context == [*draft.encode(b"here"), 3]
    draft, target = pairs["small", "large"]
    assert spell(draft, Transcript(Translation(draft, target)).follow(target.encode(b" here"))[0]) == b" here"


# What may not be


def tokenizer_of(model, **parts):
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def loaded(tokenizer, **options):
    return Loaded(tiny("llama", num_hidden_layers=1, **options), tokenizer, None)


class Slow:
    def get_vocab(self):
        return {"a": 0}


def wordpiece():
    words = models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    return tokenizer_of(words, pre_tokenizer=pre_tokenizers.Whitespace(), decoder=decoders.WordPiece())


def test_tokenizers_without_a_byte_view_are_refused_with_the_reason(large):
    for tokenizer, says in (
        (wordpiece(), "is a WordPiece that writes"),
        (Slow(), "is not one of the tokenizers library"),
    ):
        with pytest.raises(ModelError, match=says) as caught:
            vocabularies("it", loaded(tokenizer), loaded(large, vocab_size=420))
        assert "the tokenizer of it" in str(caught.value)
        assert "token 0 is '<pad>' in the target only" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(ModelError, match=f"the tokenizer of the target {says}"):
            vocabularies("it", loaded(large, vocab_size=420), loaded(tokenizer))


def letters(*pieces, merges=()):
    """A byte-level tokenizer of a few letters."""
    model = models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=list(merges))
    return tokenizer_of(
        model, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel()
    )


def test_pairs_with_too_little_in_common_are_refused_with_the_share():
    one, other = (read_vocabulary(letters(*"abcdefgh", *more), WHOLE) for more in ("xy", ""))
    few = read_vocabulary(letters(*"hstuvwxyz"), WHOLE)
    draft = DraftModel("it", ToyModel(torch.zeros(10, 10)), Translation(few, other))
    with pytest.raises(ModelError, match=r"the target has only 11\.1% of it's tokens") as caught:
        dialect_for(draft, 8, shared=True)
    assert "\n" not in str(caught.value)
    assert isinstance(dialect_for(draft, 8, shared=False), ThroughText)
    assert isinstance(dialect_for(draft._replace(translation=Translation(one, other)), 8, shared=True), ThroughShared)
    assert dialect_for(draft._replace(translation=None), 8, shared=True) is None


# What is drafted


class Speller(ToyModel):
    """Recites a text in its own tokens, from wherever it is asked, and then ends. Reads chains only."""

    def __init__(self, vocabulary, size, text):
        super().__init__(torch.zeros(size, size))
        self._vocabulary = vocabulary
        self._text = text.encode()

    def forward(self, rows, hidden_layers=()):
        logits = []
        self.passes.append(list(rows))
        for row in rows:
            held = self.tokens[row.slot]
            for place, token in enumerate([*row.tokens, *row.draft.tokens]):
                held.append(token)
                if row.wanted and place >= len(row.tokens) - row.wanted:
                    logits.append(self._next(held))
        return ForwardResult(torch.stack(logits) if logits else torch.empty(0, self.vocab_size))

    def _next(self, tokens):
        words = [token for token in tokens if token in self._vocabulary.pieces]
        data = spell(self._vocabulary, words).removeprefix(b" " if self._vocabulary.spaced else b"")
        right = self._text.startswith(data) and len(words) == len(tokens) - len(self._vocabulary.opening)
        left = self._vocabulary.encode(self._text[len(data) :]) if right else []
        logits = torch.zeros(self.vocab_size)
        logits[left[0] if left else self._vocabulary.roles["eos"]] = 20.0
        return logits


def spellers(draft, target, text, shared=False):
    """An engine whose target recites, and the model that drafts for it."""
    models_ = [Speller(view, max(*view.pieces, *view.specials) + 1, text) for view in (draft, target)]
    pair = DraftModel("it", models_[0], Translation(draft, target))
    dialect = dialect_for(pair, models_[1].vocab_size, shared)
    drafter = ModelDrafter(models_[0], models_[1].vocab_size, dialect=dialect, coupled=not shared)
    rule = RULES["rejection" if shared else "coupled"]()
    ends = frozenset([target.roles["eos"]])
    return Engine(models_[1], [drafter], rule, Fixed({"model": 5}), end_ids=ends), models_[0]


def finish(engine):
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_that_knows_the_text_is_right_in_any_tokens(pairs, pair, shared, temperature):
    draft, target = pairs[pair]
    engine, model = spellers(draft, target, TEXT, shared)
    start = target.encode(TEXT[:9].encode())
    params = SamplingParams(max_tokens=500, temperature=temperature)
    asked = engine.add([*target.opening, *start], params, 0)
    finish(engine)
    assert spell(target, asked.output[:-1]) == TEXT[9:].encode()
    assert asked.output[-1] == target.roles["eos"]
    stats = asked.stats
    # Through text only the end of a draft can be wrong, a part of a longer token; shared tokens may be other ones.
    assert stats.accepted["model"] > (0.2 if shared else 0.5) * stats.drafted["model"]
    assert stats.committed_per_pass > (2.0 if shared else 2.5)
    assert not model.tokens
    assert not engine._drafters["model"]._dialect._transcripts
    # Each token is read once, but for drafts and for the end of the text, which may be tokenised in another way later.
    fed = sum(len(row.tokens) for rows in model.passes for row in rows)
    assert fed < len(draft.encode(TEXT.encode())) + 1.1 * stats.drafted["model"] + stats.passes


def test_the_end_of_a_text_is_drafted(pairs):
    draft, target = pairs["small", "large"]
    engine, _ = spellers(draft, target, "there")
    asked = engine.add(target.encode(b"the"), SamplingParams(max_tokens=20), 0)
    finish(engine)
    assert asked.output[-1] == 3
    assert asked.credits[-1] == "model"


@pytest.mark.parametrize("cls", [ThroughShared, ThroughText])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3}]
)
def test_the_same_law_in_other_ids_draws_the_same_tokens(cls, params):
    """Shared tokens are drawn with the noise of the target's ids: a copy of the target is always right."""
    names = [char for char, byte in byte_alphabet().items() if chr(byte).isalnum() and byte < 128]
    order = random.Random(0).sample(range(len(names)), len(names))
    target, draft = letters(*names), letters(*(names[place] for place in order))
    table = torch.randn(len(names), len(names), generator=torch.Generator().manual_seed(0))
    translation = Translation(read_vocabulary(draft, WHOLE), read_vocabulary(target, WHOLE))
    size = len(names)
    drafter = ModelDrafter(ToyModel(table[order][:, order]), size, dialect=cls(translation, size, torch.device("cpu")))
    own = ModelDrafter(ToyModel(table), size)
    for seed in range(20):
        asked = Request(seed, [3, 4, 5], 3, SamplingParams(**params), seed, frozenset(), 1000)
        assert drafter.draft([asked], [6]) == own.draft([asked], [6])


def test_a_draft_ends_where_the_target_cannot_write_it():
    target = letters("<unk>", *"abc")
    target.backend_tokenizer.model.unk_token = "<unk>"
    target.add_special_tokens({"unk_token": "<unk>"})
    view = read_vocabulary(target, WHOLE)
    assert 0 in view.specials
    assert view.encode(b"abzc") == [1, 2, 0, 3]
    draft = read_vocabulary(letters(*"zabc"), WHOLE)
    dialect = ThroughText(Translation(draft, view), 4, torch.device("cpu"))
    drawn = [1, 2, 4, 3]  # z is behind the target's ids
    assert [dialect.spoken(token) for token in drawn] == [1, 2, 0, 3]
    assert list(dialect.written(drawn)) == [1, 2]


# The law of shared tokens

TARGET = ("a", "b", "c", "d", "ab")
DRAFT = ("c", "b", "ca", "ab", "a", "e")  # shared: a b c ab


def shared_drafter(seed=0, **options):
    views = (
        read_vocabulary(letters(*DRAFT, merges=[("c", "a"), ("a", "b")]), WHOLE),
        read_vocabulary(letters(*TARGET, merges=[("a", "b")]), WHOLE),
    )
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(len(DRAFT), len(DRAFT), generator=generator, dtype=torch.float64)
    dialect = ThroughShared(Translation(*views), len(TARGET), torch.device("cpu"))
    return ModelDrafter(ToyModel(table), len(TARGET), coupled=False, dialect=dialect, **options), table


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_stated_law_is_the_draft_models_over_what_is_shared(temperature):
    drafter, table = shared_drafter()
    draft = drafter.draft([request([0], temperature=temperature)], [4])[0]
    assert len(draft) == len(draft.laws) == 4
    for before, law in zip((0, *draft.tokens), draft.laws, strict=False):
        read = table[DRAFT.index(TARGET[before])]
        weights = [read[DRAFT.index(t)].div(temperature).exp() if t in DRAFT else torch.tensor(0.0) for t in TARGET]
        expected = torch.stack([w.double() for w in weights])
        assert torch.allclose(law, expected / expected.sum(), atol=1e-12)
        assert law[TARGET.index("d")] == 0.0


@pytest.mark.parametrize("rule", [Rejection, Block])
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.0}])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_law_of_the_output_is_the_targets(monkeypatch, rule, params, seed):
    """Every draft and every verdict, with their probabilities."""
    drafter, _ = shared_drafter(seed)
    chosen = SamplingParams(**params)

    def draw(chance):
        monkeypatch.setattr("bozza.drafters.model.Coins", lambda request, stream: chance)
        return drafter.draft([enumeration.request(chosen)], [2])[0]

    target = enumeration.table(seed, len(TARGET), 3)
    judged = enumeration.judge(rule, target, draw, chosen)
    assert judged.error < 1e-12
    assert judged.accepted > 0.05 or not chosen.temperature  # one token of each may be another one


def test_negative_control_a_law_that_is_not_restricted_is_noticed(monkeypatch):
    """Stated with a share for the token that is never drawn."""
    drafter, _ = shared_drafter()

    def draw(chance):
        monkeypatch.setattr("bozza.drafters.model.Coins", lambda request, stream: chance)
        draft = drafter.draft([enumeration.request()], [1])[0]
        laws = tuple(0.8 * law + 0.2 * torch.eye(len(TARGET))[TARGET.index("d")] for law in draft.laws)
        return type(draft)(draft.tokens, draft.parents, draft.drafters, laws)

    assert enumeration.judge(Rejection, enumeration.table(0, len(TARGET), 2), draw).error > 1e-3


def test_trees_hold_the_likeliest_shared_tokens():
    drafter, table = shared_drafter(width=2)
    drafter._model.forward = lambda rows: ForwardResult(
        torch.cat([table[[DRAFT.index("a")] * row.outputs] for row in rows])
    )
    draft = drafter.draft([request([0], temperature=0.0)], [6])[0]
    law = table[DRAFT.index("a")][[DRAFT.index(t) for t in TARGET if t in DRAFT]].softmax(dim=0)
    names = [t for t in TARGET if t in DRAFT]
    best = [TARGET.index(names[place]) for place in law.topk(2).indices]
    assert [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0] == best
    assert max(draft.depths()) > 1
    assert not draft.laws


# Real models, random ones


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    tiny("qwen2", seed=3, vocab_size=296).save_pretrained(path)
    small.save_pretrained(path)
    return path


PROMPTS = ["The other baker", "🙂 naïve", "def total(", "東", [2, 9, 200, 250, 131, 3, 77, 140, 255, 256, 390]]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, seed=5, top_k=30, presence_penalty=0.4, logit_bias={40: 3.0}),
]


@pytest.mark.parametrize("draft", ["k=4", "k=8,width=3"])
@pytest.mark.parametrize("params", range(len(PARAMS)))
def test_output_is_the_targets_own_alone_and_in_a_batch(large, folder, draft, params):
    llm = LLM(tiny("llama", vocab_size=424), tokenizer=large, policy="fixed", draft=[f"model:{folder},{draft}"])
    plain = llm.with_policy("off").generate(PROMPTS, PARAMS[params])
    batch = llm.generate(PROMPTS, PARAMS[params])
    alone = [llm.generate([prompt], PARAMS[params])[0] for prompt in PROMPTS]
    for outputs in (batch, alone):
        assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert all(out.stats.drafted["model"] for out in batch)
    assert [out.stats.drafted for out in batch] == [out.stats.drafted for out in alone]
    assert not llm._factory._loaded["model", str(folder)].runner.store._lengths[0]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_with_coins_state_laws_over_the_targets_ids(large, folder, rule):
    llm = LLM(tiny("llama", vocab_size=424), tokenizer=large, policy="fixed", draft=[f"model:{folder},k=3"], rule=rule)
    plain = llm.with_policy("off", rule="coupled").generate(PROMPTS, PARAMS[0])
    assert [out.token_ids for out in llm.generate(PROMPTS, PARAMS[0])] == [out.token_ids for out in plain]
    drafter = llm.engine._drafters["model"]
    seen = []
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: seen.append(draft(requests, budgets)) or seen[-1]
    llm.generate(PROMPTS, PARAMS[2])
    laws = [law for drafts in seen for one in drafts for law in one.laws]
    shared = set(llm._factory._loaded["model", str(folder)].translation.shared)
    others = [token for token in range(424) if token not in shared]
    assert len(laws) > 50
    for law in laws:
        assert law.shape == (424,)
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-5)
        assert not law[others].any()


@pytest.mark.parametrize("pair", [("small", "large"), ("large", "small")])
def test_drafts_of_a_batch_are_those_of_each_request_alone(pairs, pair):
    draft, target = pairs[pair]
    translation = Translation(draft, target)
    runner = ToyModel(torch.randn(420, 420, generator=torch.Generator().manual_seed(1)))

    def drafter():
        return ModelDrafter(runner, 420, dialect=ThroughText(translation, 420, torch.device("cpu")))

    asked = [request(target.encode(TEXT[at : at + 20].encode()), at, temperature=0.9) for at in range(0, 60, 7)]
    for one in asked:
        one.seed = one.id
    together = drafter().draft(asked, [5] * len(asked))
    assert together == [drafter().draft([one], [5])[0] for one in asked]
    assert all(0 < len(one) <= 5 for one in together)
    assert len({one.tokens for one in together}) == len(together)
