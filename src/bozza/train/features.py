"""What the target thinks of each token of the data, computed once: features for the head, and its next-token law.

The files are sized at the start and filled conversation by conversation; a run that was killed goes on where it was.
They hold about 2 bytes per feature and 6 per kept probability: 3.6 kB per token for a model of width 576.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bozza.errors import ConfigError
from bozza.models.runner import RaggedRunner, Row
from bozza.train.data import Conversation

KEPT = 16  # likeliest tokens of the target's law that are kept
CHUNK = 1024  # tokens in one pass


class Features:
    """Arrays over all tokens of some conversations, laid end to end.

    Args:
        folder: where they are, or will be.
        conversations: the data.
        layers: the target's layers whose inputs are kept.
        size: width of one of them.
        targets: the target's ids of the draft tokens.

    Raises:
        ConfigError: the disk has no room.
    """

    def __init__(
        self, folder: Path, conversations: Sequence[Conversation], layers: Sequence[int], size: int, targets: Tensor
    ) -> None:
        self.conversations = conversations
        self.layers = tuple(layers)
        lengths = [len(conversation.tokens) for conversation in conversations]
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = torch.tensor([token for conversation in conversations for token in conversation.tokens])
        self._folder, self._targets = folder, targets
        origin = {"layers": list(layers), "tokens": len(self.tokens), "data": int(self.tokens.sum())}
        origin["vocab"] = int(targets.sum())
        state = folder / "features.json"
        known = json.loads(state.read_text()) if state.exists() else {}
        self.done = known.get("done", 0) if {**known, "done": 0} == {**origin, "done": 0} else 0
        self._state, self._origin = state, origin
        total = len(self.tokens)
        needed = total * (2 * size * len(layers) + 6 * KEPT)
        folder.mkdir(parents=True, exist_ok=True)
        if self.done == 0 and shutil.disk_usage(folder).free < needed:
            raise ConfigError(f"{folder} needs {needed / 1e9:.1f} GB for {total} tokens: use fewer, or another folder")
        self.hidden = self._array("hidden", (total, size * len(layers)), np.int16)
        self.ids = self._array("ids", (total, KEPT), np.int32)
        self.probs = self._array("probs", (total, KEPT), np.float16)

    def fill(self, runner: RaggedRunner, on_progress: Callable[[int], None] = lambda done: None) -> None:
        """Compute what is missing."""
        while self.done < len(self.conversations):
            end = self.done + 1
            while end < len(self.conversations) and self.starts[end + 1] - self.starts[self.done] <= CHUNK:
                end += 1
            self._fill(runner, self.done, end)
            self.done = end
            if end % 50 < 5 or end == len(self.conversations):
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
        hidden = torch.cat([result.hidden[layer] for layer in self.layers], dim=1).to(torch.bfloat16).cpu()
        self.hidden[place] = hidden.view(torch.int16).numpy()
        laws, ids = result.logits[:, self._targets.to(result.logits.device)].softmax(dim=1).topk(KEPT, dim=1)
        self.ids[place] = ids.cpu().numpy()
        self.probs[place] = (laws / laws.sum(dim=1, keepdim=True)).cpu().numpy()

    def features(self, conversation: int) -> Tensor:
        """Bfloat16 [tokens, layers * size] of one conversation."""
        place = slice(int(self.starts[conversation]), int(self.starts[conversation + 1]))
        return torch.from_numpy(self.hidden[place].copy()).view(torch.bfloat16)

    def laws(self, conversation: int) -> tuple[Tensor, Tensor]:
        """Draft tokens int64 [tokens, KEPT] and their probabilities float32, of the token after each."""
        place = slice(int(self.starts[conversation]), int(self.starts[conversation + 1]))
        ids, probs = self.ids[place].astype(np.int64), self.probs[place].astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(probs)

    def _array(self, name: str, shape: tuple[int, ...], dtype: type) -> np.memmap:
        path = self._folder / f"{name}.bin"
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self.done == 0 or not path.exists() or path.stat().st_size != size:
            self.done = 0
            return np.memmap(path, dtype, "w+", shape=shape)
        return np.memmap(path, dtype, "r+", shape=shape)

    def _save(self) -> None:
        for array in (self.hidden, self.ids, self.probs):
            array.flush()
        scratch = self._state.with_suffix(".tmp")
        scratch.write_text(json.dumps({**self._origin, "done": self.done}))
        scratch.replace(self._state)
