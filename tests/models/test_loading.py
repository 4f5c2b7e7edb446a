import pytest
import torch

from bozza import LLM, ConfigError, ModelError, SamplingParams
from bozza.drafters.factory import Factory
from bozza.drafters.spec import parse_spec
from bozza.models import packing
from bozza.models.loading import Loaded, end_ids, load, load_packed, parse_device, resolve
from bozza.models.products import Int8Product, PackedProduct, packing_works
from bozza.models.sharing import PackedLinear
from bozza.models.vocabulary import vocabularies
from products import needs_int8, needs_packing
from tiny import VOCAB, tiny


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "use an alias (smollm2)"),
        ("/no/such/folder", "no model '/no/such/folder'"),
        ("./here/nothing", "no model './here/nothing'"),
        ("missing.gguf", "no model 'missing.gguf'"),
        ("owner/name", "the model hub does not give it"),
    ],
)
def test_missing_models_are_a_line_that_says_what_to_do(name, says):
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_a_line(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_drafts_but_does_not_speak(folders, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match="no tokenizer beside it"):
        LLM(tmp_path / "bare")
    llm = LLM(folders["target"], policy="fixed", draft=[f"model:{tmp_path / 'bare'}"])
    out = llm.generate("ab", SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert out.stats.accepted == out.stats.drafted


def test_dtypes_and_devices(folders):
    assert load(folders["target"]).model.dtype == torch.float32
    assert load(folders["target"], "bfloat16", "cpu").model.dtype == torch.bfloat16
    assert parse_device("auto").type in ("cpu", "cuda")


def kinds(model):
    return {type(each).__name__ for each in model.modules()} & {"Linear", "PackedLinear"}


def test_a_model_is_loaded_as_it_is_unless_it_is_to_be_packed(folders):
    loaded = load(folders["target"], "bfloat16", "cpu")
    assert (loaded.weights, kinds(loaded.model)) == ("plain", {"Linear"})
    full = load_packed(folders["target"], "auto", "cpu", None)  # float32, as the folder has it
    assert (full.weights, kinds(full.model)) == ("plain", {"Linear"})
    packed = load_packed(folders["target"], "bfloat16", "cpu", None)
    assert packed.weights == ("packed" if packing_works() else "plain")
    assert (packed.path, type(packed.tokenizer)) == (loaded.path, type(loaded.tokenizer))


@needs_packing
@needs_int8
def test_weights_say_what_became_of_a_model(folders):
    for quantize, weights in ((None, "packed"), ("int8", "int8")):
        loaded = load_packed(folders["target"], "bfloat16", "cpu", quantize)
        assert (loaded.weights, kinds(loaded.model)) == (weights, {"PackedLinear"})
        assert not loaded.model.training


@needs_packing
@needs_int8
@pytest.mark.parametrize(("quantize", "kind"), [(None, PackedProduct), ("int8", Int8Product)])
def test_draft_models_are_what_the_target_is_and_heads_are_quantized(folders, quantize, kind):
    target = load_packed(folders["target"], "bfloat16", "cpu", quantize)
    factory = Factory(target, VOCAB)
    factory.load([parse_spec(f"model:{folders['shallow']}"), parse_spec(f"eagle:{folders['head']}")])
    model, head = factory._loaded.values()
    for module, expected in ((model.runner._model, kind), (head.head, Int8Product)):
        assert kinds(module) == {"PackedLinear"}
        packed = [each for each in module.modules() if isinstance(each, PackedLinear)]
        assert {type(each._shared.product) for each in packed} == {expected}


@pytest.mark.parametrize(
    ("quantize", "device", "error", "says"),
    [
        ("int4", "cpu", ConfigError, "quantize 'int4': use int8, or leave it out"),
        ("int8", "cpu", ModelError, "VNNI or AMX"),
        ("int8", "meta", ModelError, "for CPUs"),
        ("int8", "gpu", ConfigError, "device 'gpu'"),
    ],
)
def test_wrong_quantization_is_refused_before_a_model_is_looked_for(monkeypatch, quantize, device, error, says):
    monkeypatch.setattr(packing, "int8_works", lambda: False)
    with pytest.raises(error) as caught:
        load_packed("/no/such", "auto", device, quantize)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "expected"), [(None, set()), (2, {2}), ([2, 7], {2, 7})])
def test_report_3_end_tokens_as_generate_takes_them(config, expected):
    model = tiny("llama")
    model.generation_config.eos_token_id = config
    assert end_ids(model) == expected


class Vocabulary:
    def __init__(self, tokens):
        self._tokens = tokens

    def get_vocab(self):
        return {token: id_ for id_, token in enumerate(self._tokens)}


def loaded(tokens, vocab_size):
    return Loaded(tiny("llama", vocab_size=vocab_size, num_hidden_layers=1), Vocabulary(tokens), None)


def test_report_105_106_padded_vocabularies_are_the_same_vocabulary():
    tokens = [f"t{i}" for i in range(90)]
    assert vocabularies("draft", loaded(tokens, 96), loaded(tokens, 104)) is None
    assert vocabularies("draft", loaded(tokens[:80], 80), loaded(tokens, 104)) is None  # it drafts what it has


def test_report_107_111_a_foreign_vocabulary_is_refused_with_a_token():
    tokens = [f"t{i}" for i in range(90)]
    other = [*tokens[:50], "else", *tokens[51:]]
    with pytest.raises(ModelError, match=r"draft has another vocabulary than the target \(token 50 is 't50'"):
        vocabularies("draft", loaded(other, 96), loaded(tokens, 96))


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(211, 224), (224, 211)])
def test_report_105_padded_embeddings_draft_and_never_leak(target_vocab, draft_vocab, tmp_path):
    model = tiny("llama", vocab_size=target_vocab)
    tiny("llama", seed=1, vocab_size=draft_vocab).save_pretrained(tmp_path / "draft")
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=1, ignore_eos=True)
    plain = LLM(model, policy="off").generate([[5, 6]], params)[0]
    out = LLM(model, policy="fixed", draft=[f"model:{tmp_path / 'draft'}"]).generate([[5, 6]], params)[0]
    assert out.token_ids == plain.token_ids
    unreadable = [place for place, token in enumerate(out.token_ids) if token >= draft_vocab]
    assert bool(unreadable) == (target_vocab > draft_vocab)
    # Drafting ends where the draft model can no longer read along.
    assert out.stats.drafted["model"] > (0 if unreadable else 20)
