"""Small random models of many architectures, and short texts. Nothing here needs a network."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bozza.models.eagle import EagleHead, HeadShape, default_features, start_from_target
from bozza.models.heads import layer_like

VOCAB = 211
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that logits differ clearly and greedy texts are not all alike.
    "initializer_range": 0.3,
}
SLIDING_FIRST = ["sliding_attention", "full_attention", "full_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": SLIDING_FIRST},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": SLIDING_FIRST},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": SLIDING_FIRST,
    },
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "stablelm": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt2": {},
}
WRONG_WHEN_RAGGED: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False},
    "bloom": {"n_layer": 3, "n_head": 4},
    "qwen2_moe": {  # it has a window, but attends through a mask alone
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": SLIDING_FIRST,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


def tiny(architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model of an architecture, always the same for the same arguments."""
    torch.manual_seed(seed)
    known = ARCHITECTURES | WRONG_WHEN_RAGGED
    config = AutoConfig.for_model(architecture, **(BASE | known.get(architecture, {}) | options))
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def shallower(model: Any, layers: int) -> Any:
    """The same model without its last layers: a drafter that is often, but not always, right."""
    options = model.config.to_dict() | {"num_hidden_layers": layers}
    if options.get("layer_types"):
        options["layer_types"] = options["layer_types"][:layers]
    smaller = type(model)(type(model.config)(**options)).eval().to(model.dtype)
    smaller.load_state_dict(model.state_dict(), strict=False)
    return smaller


def tiny_head(model: Any, seed: int = 0, layers: int = 1, draft_vocab: int = 60) -> EagleHead:
    """A random EAGLE head for a tiny model, with a draft vocabulary of every third token."""
    torch.manual_seed(seed)
    config = layer_like(model, layers)
    shape = HeadShape(config, default_features(model.config.num_hidden_layers), config.hidden_size, draft_vocab)
    head = EagleHead(shape, model.get_input_embeddings(), torch.arange(draft_vocab) * 3)
    start_from_target(head, model)
    for weight in head.parameters():  # not the target again
        weight.data += 0.1 * torch.randn_like(weight)
    return head.requires_grad_(False).to(model.dtype).eval()


def token_prompts(count: int = 20, seed: int = 0) -> list[list[int]]:
    """Prompts of token ids: one token, one repeated token, repeated phrases, and noise of growing length."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> list[int]:
        ids: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        return ids

    special = [[5], [7] * 12, noise(4) * 5, noise(1), noise(2) * 9, noise(40)]
    return (special + [noise(3 + 2 * i) for i in range(count)])[:count]
