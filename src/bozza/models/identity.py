"""What distinguishes a model and its vocabulary from others, in a line."""

from __future__ import annotations

import hashlib
import json

from bozza.models.loading import Loaded


def identity(loaded: Loaded, vocab_size: int) -> str:
    """Architecture, shape and vocabulary; not the weights, so that fine-tunes of one model count as the same.

    Args:
        loaded: the model.
        vocab_size: of its logits.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    shape = "x".join(str(getattr(config, name, "?")) for name in ("num_hidden_layers", "hidden_size"))
    vocabulary = "no tokenizer"
    if loaded.tokenizer is not None:
        known = json.dumps(sorted(loaded.tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))
        vocabulary = f"vocabulary {hashlib.blake2b(known.encode(), digest_size=6).hexdigest()}"
    return f"{config.model_type} {shape}, {vocab_size} tokens, {vocabulary}"
