"""MTP modules from disk: exactly what was written, or one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bozza import ModelError
from bozza.drafters.factory import load_modules
from bozza.models import mtp_files
from bozza.models.loading import Loaded, load
from bozza.models.mtp_files import NONE, load_mtp, save_mtp
from mtp_checkpoints import FAMILIES, Written, publish, rewrite, tiny_modules
from tiny import tiny

BY_TRANSFORMERS = ("mellum",)  # the others' patterns hold for the published number of layers only, or are not loaded


@pytest.fixture(params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return publish(request.param, tmp_path)


def check(head: Any, written: Written) -> None:
    """All weights, those of the experts too, are those that were written."""
    assert len(head.steps) == len(written.own)
    for step, own, block in zip(head.steps, written.own, written.blocks, strict=True):
        for name, tensor in own.items():
            assert torch.equal(getattr(step, name).weight, tensor), name
        theirs = block.state_dict()
        assert step.block.state_dict().keys() == theirs.keys()
        for name, tensor in step.block.state_dict().items():
            assert torch.equal(tensor, theirs[name]), name


def test_what_was_written_is_loaded(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(written.folder).model
    through = []
    ours = mtp_files._by_transformers
    monkeypatch.setattr(mtp_files, "_by_transformers", lambda *args: through.append(ours(*args)) or through[-1])
    head = load_mtp(written.folder, target)
    check(head, written)
    assert (through[0] is not None) == (target.config.model_type in BY_TRANSFORMERS)
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in head.parameters())


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_loads_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a target of this size had been published."""
    written = publish(name, tmp_path)
    target = load(written.folder).model
    target.config.num_nextn_predict_layers = FAMILIES[name].steps
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34].*"]
    monkeypatch.setattr(mtp_files, "_from_shards", None)
    rewrite(
        written.folder, {"model.layers.3.embed_tokens.weight": None, "model.layers.3.shared_head.head.weight": None}
    )
    check(load_mtp(written.folder, target), written)


def test_a_shard_of_its_own(written: Written) -> None:
    """Beside an index, and in bfloat16."""
    rewrite(written.folder, dict.fromkeys(written.added))
    base = load_file(written.folder / "model.safetensors")
    (written.folder / "model.safetensors").unlink()
    save_file(base, written.folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(written.added, written.folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(base, "model-00001-of-00002.safetensors") | dict.fromkeys(
        written.added, "model-00002-of-00002.safetensors"
    )
    (written.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    check(load_mtp(written.folder, load(written.folder).model), written)
    head = load_mtp(written.folder, load(written.folder, "bfloat16").model)
    assert head.steps[0].eh_proj.weight.dtype == torch.bfloat16
    assert torch.equal(head.steps[0].eh_proj.weight, written.own[0]["eh_proj"].bfloat16())


def refusal(folder: Path, target: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_mtp(folder, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def key_of(written: Written, ending: str) -> str:
    return next(key for key in sorted(written.added) if key.endswith(ending))


@pytest.mark.parametrize(
    ("family", "ending", "says"),
    [
        ("deepseek_v3", "q_b_proj.weight", "no self_attn.q_b_proj.weight of MTP module 0"),
        ("deepseek_v3", "shared_head.norm.weight", "no norm.weight of MTP module 0"),
        ("deepseek_v3", "experts.3.up_proj.weight", "no mlp.experts.3.up_proj.weight of MTP module 0"),
        ("glm4_moe", "hnorm.weight", "no hnorm.weight of MTP module 0"),
        ("glm4_moe", "mlp.gate.weight", "no mlp.gate.weight of MTP module 0"),
        ("exaone_moe", "fc.weight", "no eh_proj.weight of MTP module 0"),
        ("exaone_moe", "q_proj.weight", "no self_attn.q_proj.weight of MTP module 0"),
        ("mellum", "input_layernorm.weight", "no input_layernorm.weight of MTP module 0"),
        ("mellum", "experts.2.down_proj.weight", "no mlp.experts.2.down_proj.weight of MTP module 0"),
        ("mimo_v2_flash", "2.pre_mlp_layernorm.weight", "no post_attention_layernorm.weight of MTP module 2"),
        ("mimo_v2_flash", "1.self_attn.attention_sink_bias", "no self_attn.sinks of MTP module 1"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, family: str, ending: str, says: str) -> None:
    written = publish(family, tmp_path)
    target = load(written.folder).model
    rewrite(written.folder, {key_of(written, ending): None})
    assert says in refusal(written.folder, target)


@pytest.mark.parametrize("ending", ["self_attn.o_proj.weight", "input_layernorm.weight", "norm.weight"])
def test_wrong_shapes_are_named(written: Written, ending: str) -> None:
    target = load(written.folder).model
    rewrite(written.folder, {key_of(written, ending): torch.ones(3, 5)})
    said = refusal(written.folder, target)
    assert ending in said
    assert "[3, 5]" in said


def test_unknown_tensors_are_named(written: Written) -> None:
    target = load(written.folder).model
    place = key_of(written, "self_attn.o_proj.weight").removesuffix("o_proj.weight")
    rewrite(written.folder, {f"{place}extra.weight": torch.ones(2)})
    assert "self_attn.extra.weight of MTP module 0" in refusal(written.folder, target)
    rewrite(written.folder, {f"{place}extra.weight": None, "model.mtp_block.0.norm.weight": torch.ones(2)})
    assert "model.mtp_block.0.norm.weight is no part" in refusal(written.folder, target)


def test_a_module_left_out(tmp_path: Path) -> None:
    written = publish("mimo_v2_flash", tmp_path)
    target = load(written.folder).model
    rewrite(written.folder, {key: None for key in written.added if ".layers.1." in key})
    assert "MTP module 1" in refusal(written.folder, target)


def test_checkpoints_without_modules(tmp_path: Path, target: Any) -> None:
    target.save_pretrained(tmp_path / "plain")
    assert refusal(tmp_path / "plain", target) == NONE
    assert "no config.json" in refusal(tmp_path, target)
    with pytest.raises(ModelError, match="mtp:FOLDER"):
        load_modules(None, Loaded(target, None, None))


def test_trained_heads_are_read_as_they_were_saved(tmp_path: Path, target: Any) -> None:
    head = tiny_modules(target, steps=2)
    save_mtp(head, tmp_path / "heads", "tiny")
    read = load_mtp(tmp_path / "heads", target)
    assert len(read.steps) == 2
    ours, theirs = head.state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), theirs[key].bfloat16()), key
    assert {weight.dtype for weight in read.parameters()} == {torch.float32}
    read = load_mtp(tmp_path / "heads", tiny("llama", dtype=torch.bfloat16))
    assert {weight.dtype for weight in read.parameters()} == {torch.bfloat16}


def test_trained_heads_for_another_target(tmp_path: Path, target: Any) -> None:
    save_mtp(tiny_modules(target), tmp_path, "tiny")
    assert "width 64, the target 32" in refusal(tmp_path, tiny("llama", hidden_size=32))
    rewrite(tmp_path, {"layers.1.block.mlp.up_proj.weight": None})
    assert "no layers.1.block.mlp.up_proj.weight" in refusal(tmp_path, target)
    rewrite(tmp_path, {"layers.1.block.mlp.up_proj.weight": torch.ones(3)})
    assert "layers.1.block.mlp.up_proj.weight has shape [3]" in refusal(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be loaded" in refusal(tmp_path, target)
