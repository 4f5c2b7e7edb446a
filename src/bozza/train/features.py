"""What the target thinks of each token of the data, computed once: features for the head, and its next-token law.

The files are sized at the start and filled conversation by conversation; a run that was killed goes on where it was.
They hold about 2 bytes per feature and 6 per kept probability: 3.6 kB per token for a model of width 576.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bozza.errors import ConfigError
from bozza.models.runner import RaggedRunner, Row
from bozza.train.data import Conversation

KEPT = 16  # likeliest tokens of the target's law that are kept
CHUNK = 1024  # tokens in one pass
SAVED_EVERY = 50  # conversations


class Features:
    """Arrays over all tokens of some conversations, laid end to end.

    Args:
        folder: where they are, or will be. What is there for the first of these conversations is used.
        conversations: the data.
        layers: the target's layers whose inputs are kept.
        size: width of one of them.

    Raises:
        ConfigError: the disk has no room.
    """

    def __init__(self, folder: Path, conversations: Sequence[Conversation], layers: Sequence[int], size: int) -> None:
        self.conversations = conversations
        self.layers = tuple(layers)
        lengths = [len(conversation.tokens) for conversation in conversations]
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._tokens = np.array([t for conversation in conversations for t in conversation.tokens], np.int32)
        self._folder, self._state = folder, folder / "features.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done = self._known()
        total = len(self._tokens)
        needed = (total - int(self.starts[self.done])) * (2 * size * len(layers) + 6 * KEPT)
        if shutil.disk_usage(folder).free < needed:
            raise ConfigError(f"{folder} needs {needed / 1e9:.1f} GB for {total} tokens: use fewer, or another folder")
        if not self.done:  # what the file speaks of is about to be written over
            self._state.unlink(missing_ok=True)
        self.hidden = self._array("hidden", (total, size * len(layers)), np.int16)
        self.ids = self._array("ids", (total, KEPT), np.int32)
        self.probs = self._array("probs", (total, KEPT), np.float16)

    def _known(self) -> int:
        """How many of the conversations are there already."""
        if not self._state.exists():
            return 0
        state = json.loads(self._state.read_text())
        done = min(state["done"], len(self.conversations))
        same = state["done"] <= done and state == self._origin(done)
        return done if same else 0

    def _origin(self, done: int) -> dict[str, Any]:
        """What the first `done` conversations and their features are."""
        digest = hashlib.sha256(self._tokens[: self.starts[done]].tobytes()).hexdigest()[:16]
        return {"layers": list(self.layers), "done": done, "tokens": digest}

    def fill(self, runner: RaggedRunner, on_progress: Callable[[int], None] = lambda done: None) -> None:
        """Compute what is missing."""
        while self.done < len(self.conversations):
            end = self.done + 1
            while end < len(self.conversations) and self.starts[end + 1] - self.starts[self.done] <= CHUNK:
                end += 1
            self._fill(runner, self.done, end)
            due = end // SAVED_EVERY > self.done // SAVED_EVERY or end == len(self.conversations)
            self.done = end
            if due:
                self._save()
            on_progress(int(self.starts[end]))

    @torch.inference_mode()
    def _fill(self, runner: RaggedRunner, first: int, last: int) -> None:
        conversations = self.conversations[first:last]
        rows = [Row(runner.alloc(), c.tokens, wanted=len(c.tokens)) for c in conversations]
        try:
            result = runner.forward(rows, self.layers)
        finally:
            for row in rows:
                runner.free(row.slot)
        place = slice(int(self.starts[first]), int(self.starts[last]))
        if self.layers:
            hidden = torch.cat([result.hidden[layer] for layer in self.layers], dim=1).to(torch.bfloat16).cpu()
            self.hidden[place] = hidden.view(torch.int16).numpy()
        best, ids = result.logits.topk(KEPT, dim=1)
        self.ids[place] = ids.cpu().numpy()
        self.probs[place] = (best - result.logits.logsumexp(dim=1, keepdim=True)).exp().cpu().numpy()

    def features(self, conversation: int) -> Tensor:
        """Bfloat16 [tokens, layers * size] of one conversation."""
        place = slice(int(self.starts[conversation]), int(self.starts[conversation + 1]))
        return torch.from_numpy(self.hidden[place].copy()).view(torch.bfloat16)

    def laws(self, conversation: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens int64 [tokens, KEPT] after each token, and their probabilities float32."""
        place = slice(int(self.starts[conversation]), int(self.starts[conversation + 1]))
        ids, probs = self.ids[place].astype(np.int64), self.probs[place].astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(probs)

    def _array(self, name: str, shape: tuple[int, ...], dtype: type) -> Any:
        if 0 in shape:
            return np.zeros(shape, dtype)
        path = self._folder / f"{name}.bin"
        path.touch()
        with path.open("r+b") as file:
            file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.memmap(path, dtype, "r+", shape=shape)

    def _save(self) -> None:
        for array in (self.hidden, self.ids, self.probs):
            if isinstance(array, np.memmap):
                array.flush()
        scratch = self._state.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._origin(self.done)))
        scratch.replace(self._state)
