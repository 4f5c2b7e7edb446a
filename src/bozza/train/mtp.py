"""Train sequential multi-token-prediction heads for a target without modules (DeepSeek-V3 report, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bozza.models.attention import PLAIN, How
from bozza.models.mtp import MtpHead
from bozza.train.features import Features
from bozza.train.lines import Frequent, Lines, lay_out
from bozza.train.loop import Agreement, Recipe, Trainer


def start_modules(head: MtpHead, target: Any) -> None:
    """Let each module begin as the target's last layer on what it is handed, its embedding without a say."""
    last = target.base_model.layers[-1]
    with torch.no_grad():
        for module in head.steps:
            size = module.shape.size
            module.eh_proj.weight.zero_()
            module.eh_proj.weight[:, size:] = torch.eye(size)
            module.block.load_state_dict(last.state_dict())
            module.norm.load_state_dict(target.base_model.norm.state_dict())


class MtpTrainer(Trainer):
    """Trains all modules together; embedding and output rows stay the target's. See `Trainer` for the arguments.

    Args:
        frequent: over which tokens laws are compared.
    """

    def __init__(self, head: MtpHead, frequent: Frequent, features: Features, recipe: Recipe, checkpoint: Path) -> None:
        self.head = head
        self._frequent = frequent
        super().__init__(head, features, recipe, checkpoint)

    def loss(self, chosen: Sequence[int]) -> Tensor:
        """Mean cross-entropy of the modules against the target's law (equations 24 and 25)."""
        lines = lay_out(self._features, chosen, self._device)
        losses = []
        for depth, hidden in enumerate(self._run(lines), 1):
            seen = lines.ahead(depth)
            with torch.autocast(self._device.type, torch.bfloat16):
                logits = self._frequent.logits(hidden[seen.due]).float()
            losses.append(self._frequent.entropy(logits, seen.law_ids[seen.due], seen.law_probs[seen.due]))
        return torch.stack(losses).mean()

    @torch.inference_mode()
    def agreement(self, most: int = 60) -> Agreement:
        """On held-out answers, how long a chain of first guesses agrees with what came, one module a depth."""
        right, tried = [0] * len(self.head.steps), [0] * len(self.head.steps)
        for chosen in self._pack(self.held_out[:most]):
            lines = lay_out(self._features, chosen, self._device)
            alive = lines.ahead(1).due
            for step, hidden in enumerate(self._run(lines)):
                seen = lines.ahead(step + 1)
                with torch.autocast(self._device.type, torch.bfloat16):
                    guesses = self._frequent.targets[self._frequent.logits(hidden).argmax(dim=2)]
                alive = alive & seen.due
                tried[step] += int(alive.sum())
                alive = alive & (guesses == seen.next_tokens)
                right[step] += int(alive.sum())
        return Agreement.of(right, tried)

    def _run(self, lines: Lines) -> list[Tensor]:
        """What each module makes of each slot, [lines, length, size]."""
        count, length = lines.tokens.shape
        positions = torch.arange(length, device=self._device).repeat(count)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, how: How = PLAIN) -> Tensor:
            share = query.shape[0] // key.shape[0]
            parts = (query, key.repeat_interleave(share, 0), value.repeat_interleave(share, 0))
            lines_of, keys, values = (part.reshape(len(part), count, length, -1).transpose(0, 1) for part in parts)
            out = functional.scaled_dot_product_attention(lines_of, keys, values, is_causal=True, scale=how.scale)
            return out.transpose(1, 2).flatten(0, 1)

        outputs = []
        hidden = lines.hidden.flatten(0, 1)
        with torch.autocast(self._device.type, torch.bfloat16):
            for depth, module in enumerate(self.head.steps, 1):
                hidden = module(lines.ahead(depth).tokens.flatten(), hidden, positions, attend)
                outputs.append(hidden.view(count, length, -1))
        return outputs
