"""Whether two models mean the same thing by the same token id."""

from __future__ import annotations

from bozza.errors import ModelError
from bozza.models.loading import Loaded


def check_same_vocabulary(name: str, draft: Loaded, target: Loaded) -> None:
    """Accept a draft model whose tokens are the target's. Embeddings may be padded to different sizes.

    Models without tokenizers are taken at their word: a wrong guess costs time, never correctness.

    Raises:
        ModelError: an id means different tokens in the two; the message names one.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        return
    drafts, targets = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if drafts == targets:
        return
    for token, id_ in sorted(targets.items(), key=lambda item: item[1]):
        if drafts.get(token) != id_ and id_ < draft.model.config.get_text_config(decoder=True).vocab_size:
            raise ModelError(
                f"{name} has another vocabulary than the target (token {id_} is {token!r} in the target only): "
                "draft with a model of the same family"
            )
