"""EAGLE heads on disk: both published layouts give the head that was written, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eagle3
from bozza.errors import ModelError
from bozza.models.catalog import DEFAULT_MODEL, cached_path
from bozza.models.eagle import EagleHead, HeadShape, default_features
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.heads import layer_like, load_head, save_head, shipped_head
from bozza.models.runner import Row
from tiny import VOCAB, tiny, tiny_head

IDS = [5, 9, 200, 17, 9, 64]


def bfloat16(head: EagleHead) -> EagleHead:
    """The head with weights that survive being written."""
    for weight in head.parameters():
        weight.data = weight.data.bfloat16().float()
    return head


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def guesses(head: EagleHead) -> Tensor:
    """Logits of a head for a fixed text with random features."""
    features = torch.randn(len(IDS), head.fc.in_features, generator=torch.Generator().manual_seed(1))
    runner = HeadRunner(head)
    row = HeadRow(Row(runner.alloc(), IDS, wanted=len(IDS)), runner.fuse(features))
    return runner.forward([row])[1]


def written_out(weights: dict[str, Tensor], config: Any, *, normed: bool = False) -> Tensor:
    """The same, in plain torch."""
    features = torch.randn(len(IDS), weights["fc.weight"].shape[1], generator=torch.Generator().manual_seed(1))
    hidden = eagle3.outputs(weights, config, torch.tensor(IDS), features @ weights["fc.weight"].T, normed=normed)
    return eagle3.logits(weights, config, hidden)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own_rows", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_a_head_that_is_written_and_loaded_is_the_same(
    model: Any, tmp_path: Path, layers: int, own_rows: bool, normed: bool
) -> None:
    made = tiny_head(model, layers=layers)
    head = EagleHead(
        HeadShape(made.shape.layer, (0, 2), 64, 60, norm_before_residual=normed), made.embed[0], made.targets
    )
    bfloat16(head.requires_grad_(False))
    if not own_rows:
        head.lm_head.weight.copy_(model.lm_head.weight[head.targets])
    save_head(head, tmp_path / "made" / "here", "tiny", own_rows=own_rows)
    loaded = load_head(tmp_path / "made" / "here", model)
    assert loaded.shape.features == (0, 2)
    assert loaded.shape.norm_before_residual == normed
    assert len(loaded.layers) == layers
    assert torch.equal(loaded.targets, head.targets)
    assert not loaded.training
    assert torch.equal(guesses(loaded), guesses(head))
    close(guesses(loaded), written_out(eagle3.named(head), head.shape.layer, normed=normed))
    found = load_file(tmp_path / "made" / "here" / "model.safetensors")
    assert ("lm_head.weight" in found) == own_rows
    assert all(tensor.dtype == (torch.int64 if key == "d2t" else torch.bfloat16) for key, tensor in found.items())


def test_a_head_takes_on_the_dtype_of_its_target(tmp_path: Path) -> None:
    save_head(tiny_head(tiny("llama")), tmp_path, "tiny", own_rows=True)
    head = load_head(tmp_path, tiny("llama", dtype=torch.bfloat16))
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}


def test_positions_are_turned_in_full_precision_whatever_the_dtype(tmp_path: Path) -> None:
    """Else the head that drafts is another than the one that was trained: more so the longer the text."""
    save_head(tiny_head(tiny("llama")), tmp_path, "tiny", own_rows=True)
    exact = load_head(tmp_path, tiny("llama"))
    head = load_head(tmp_path, tiny("llama", dtype=torch.bfloat16))
    positions = torch.tensor([[0, 3, 100, 5000]])
    for ours, theirs in zip(
        head.rotary(torch.zeros(1, 4, 64), positions), exact.rotary(torch.zeros(1, 4, 64), positions), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_configuration_is_that_of_speculators(model: Any, tmp_path: Path) -> None:
    save_head(tiny_head(model, layers=2), tmp_path, "owner/tiny", own_rows=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 60
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/tiny"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["hidden_size"]) == ("llama", 2, 64)


def authors_layout(model: Any, folder: Path, *, binary: bool, own_embedding: bool) -> tuple[dict[str, Tensor], Any]:
    """A head as its authors publish it. Returns its tensors by the names of `eagle3`, and its configuration."""
    head = bfloat16(tiny_head(model, seed=3))
    weights = eagle3.named(head)
    if own_embedding:
        weights["embed_tokens.weight"] = torch.randn(VOCAB, 64).bfloat16().float()
    tensors = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in weights.items()}
    if not own_embedding:
        del tensors["embed_tokens.weight"]
    tensors["d2t"] = head.targets - torch.arange(60)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, head.targets, True)
    folder.mkdir(exist_ok=True)
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": head.shape.layer.rms_norm_eps,
        "vocab_size": VOCAB,
        "draft_vocab_size": 60,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return weights, head.shape.layer


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_the_authors_layout_gives_the_same_head(model: Any, tmp_path: Path, binary: bool, own_embedding: bool) -> None:
    weights, config = authors_layout(model, tmp_path, binary=binary, own_embedding=own_embedding)
    loaded = load_head(tmp_path, model)
    close(guesses(loaded), written_out(weights, config))
    assert torch.equal(loaded.targets, torch.arange(60) * 3)
    assert loaded.shape.features == default_features(3)
    assert (loaded.embed[0] is model.get_input_embeddings()) == (not own_embedding)


def test_the_residual_begins_with_the_normed_state_only_where_the_head_says_so(model: Any, tmp_path: Path) -> None:
    weights, config = authors_layout(model, tmp_path, binary=False, own_embedding=False)
    plain = guesses(load_head(tmp_path, model))
    change(tmp_path, lambda settings, _: settings.update(norm_before_residual=True))
    normed = guesses(load_head(tmp_path, model))
    close(normed, written_out(weights, config, normed=True))
    close(plain, written_out(weights, config))
    assert float((normed - plain).abs().max()) > 0.1


def test_without_a_map_the_draft_vocabulary_is_the_first_tokens(model: Any, tmp_path: Path) -> None:
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)
    change(tmp_path, lambda _, tensors: tensors.pop("d2t"))
    assert torch.equal(load_head(tmp_path, model).targets, torch.arange(60))


def test_rows_that_are_left_out_are_the_targets(model: Any, tmp_path: Path) -> None:
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=False)
    loaded = load_head(tmp_path, model)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight[loaded.targets])


def test_weights_in_several_files_are_put_together(model: Any, tmp_path: Path) -> None:
    head = bfloat16(tiny_head(model))
    save_head(head, tmp_path, "tiny", own_rows=True)
    tensors = load_file(tmp_path / "model.safetensors")
    half = sorted(tensors)[::2]
    save_file({key: tensors[key] for key in half}, tmp_path / "model.safetensors")
    save_file({key: tensors[key] for key in tensors.keys() - half}, tmp_path / "model-2.safetensors")
    assert torch.equal(guesses(load_head(tmp_path, model)), guesses(head))


@pytest.mark.parametrize(
    ("layers", "features"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (1, 2)), (12, (2, 6, 9)), (30, (2, 15, 27)), (32, (2, 16, 29))],
)
def test_low_middle_and_high_layers_are_read_by_default(layers: int, features: tuple[int, ...]) -> None:
    assert default_features(layers) == features


def change(folder: Path, how: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """Write a head with another configuration or other tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    how(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


FC, DOWN = "fc.weight", "layers.0.mlp.down_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "token beyond the target": (lambda c, t: t["d2t"].__setitem__(59, VOCAB - 59), f"d2t leads to token {VOCAB}, "),
    "token below zero": (lambda c, t: t["d2t"].__setitem__(7, -8), "d2t leads to token -1, "),
    "map of another length": (lambda c, t: t.update(d2t=t["d2t"][:50]), r"d2t has shape \[50\], draft_vocab_size is"),
    "missing tensor": (lambda c, t: t.pop(DOWN), f"the head has no {DOWN}"),
    "unknown tensor": (lambda c, t: t.update({"layers.0.bonus.weight": t[FC].clone()}), r"layers\.0\.bonus\.weight is"),
    "wrong shape": (lambda c, t: t.update({FC: t[FC][:, :64]}), r"fc\.weight has shape \[64, 64\], .* \[64, 192\]"),
    "small embedding": (lambda c, t: t.update({"embed_tokens.weight": torch.zeros(200, 64)}), "embedding of 200 x 64"),
    "other speculator": (lambda c, t: c.update(speculators_model_type="mlp"), "a head of type 'mlp' cannot run here"),
    "other layers": (lambda c, t: c["transformer_layer_config"].update(model_type="qwen3"), "layers of qwen3"),
    "no draft vocabulary": (lambda c, t: c.pop("draft_vocab_size"), "no draft_vocab_size"),
    "deeper than the target": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 4]), "reads layer 4, "),
    "no layer configuration": (lambda c, t: c.pop("transformer_layer_config"), "transformer_layer_config"),
    "more layers than weights": (
        lambda c, t: c["transformer_layer_config"].update(num_hidden_layers=2),
        r"the head has no layers\.1\.",
    ),
}


def refused(folder: Path, target: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        load_head(folder, target)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_in_a_line_that_names_it(model: Any, tmp_path: Path, what: str) -> None:
    how, says = WRONG[what]
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)
    load_head(tmp_path, model)
    change(tmp_path, how)
    refused(tmp_path, model, says)


def test_a_head_for_another_target_is_refused(model: Any, tmp_path: Path) -> None:
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)
    refused(tmp_path, tiny("llama", hidden_size=32), r"embedding of 211 x 32 does not fit: the head has width 64")
    refused(tmp_path, tiny("llama", vocab_size=150), "d2t leads to token 150, the target has 0 to 149")
    refused(tmp_path, tiny("llama", num_hidden_layers=1), "reads layer 2, the target has layers 0 to 1")


def test_folders_without_a_head_and_damaged_files_are_refused(model: Any, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", model, "no head in .*nowhere: name a folder with config.json")
    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, model, f"the head in {tmp_path} cannot be loaded")
    file.unlink()
    refused(tmp_path, model, f"no weights in {tmp_path}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    refused(tmp_path, model, "cannot be loaded")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, model, "cannot be loaded")


def test_a_pickle_that_would_run_code_is_not_run(model: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "owned",)

    authors_layout(model, tmp_path, binary=True, own_embedding=False)
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, model, "cannot be loaded")
    assert not (tmp_path / "owned").exists()


def test_layers_of_a_head_are_like_the_targets() -> None:
    config = layer_like(tiny("llama", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), 2, 3)
    assert (config.num_hidden_layers, config.intermediate_size, config.head_dim) == (2, 288, 32)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.num_key_value_heads == 2
    assert layer_like(tiny("gpt2"), 1).hidden_size == 64  # names its sizes in its own way


def test_the_head_that_comes_along_is_for_the_default_model_only(tmp_path: Path) -> None:
    for other in (None, tmp_path, cached_path(DEFAULT_MODEL).parent):
        with pytest.raises(ModelError, match=rf"is for {DEFAULT_MODEL}: name another with eagle:FOLDER") as caught:
            shipped_head(other)
        assert "\n" not in str(caught.value)
    assert shipped_head(cached_path(DEFAULT_MODEL)).parts[-2:] == ("heads", DEFAULT_MODEL)
