"""The noise of rule `coupled`: an exponential variable per (seed, output position, token), computed where needed.

Sampling from softmax(x) is a race: token v arrives at time T_v / exp(x_v) with T_v ~ Exp(1), and the first one wins
(the Gumbel-max trick with G_v = -log T_v). Computing T_v for a whole vocabulary costs more than a small model's
pass, so the race is built top-down, as in A* sampling (Maddison, Tarlow and Minka, 2014, section 3): tokens
come in blocks of 64, the earliest arrival of a block is m ~ Exp(64), its place is uniform, and all others are m plus an
Exp(1), because an exponential has no memory. The T_v so made are independent Exp(1) variables, while m alone bounds
a whole block: only blocks that may hold the winner are opened.

Numbers come from a counter-based integer hash of (key, index), so they are the same for any batch, device or vocabulary
padding, and no generator has a state that one request could disturb for another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64  # tokens per block
LIKELY = 32  # tokens whose best score decides which blocks are opened
_MASK = 0xFFFFFFFF


def race_keys(seeds_and_positions: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """One pair of 32-bit keys per (seed, output position), as int64 [rows, 2]."""
    keys = []
    for seed, position in seeds_and_positions:
        digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
        keys.append((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")))
    return torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 2)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64, made of xor-shifts and odd multiplications."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0xD35A2D97) & _MASK
    return x ^ (x >> 15)


def _hash(keys: Tensor, index: Tensor) -> Tensor:
    """Uniform 32-bit integers for keys [rows, 2] and index [rows or 1, n]."""
    return _mix(_mix(index ^ keys[:, :1]) ^ keys[:, 1:])


def _exponential(bits: Tensor) -> Tensor:
    """Exp(1) from 32 uniform bits, float64; log1p keeps small arrivals, the ones that win, exact."""
    return torch.log1p(-(bits.double() + 0.5) * 2.0**-32).neg_()


def _block_first(keys: Tensor, blocks: Tensor) -> Tensor:
    """Earliest arrival of each block, Exp(64). Odd indices belong to blocks, even ones to tokens."""
    return _exponential(_hash(keys, blocks * 4 + 1)) / BLOCK


def _place(keys: Tensor, blocks: Tensor) -> Tensor:
    """Where in its block the earliest arrival is: uniform in 0..63, the top 6 bits of a hash."""
    return _hash(keys, blocks * 4 + 3) >> 26


def arrivals(keys: Tensor, tokens: Tensor) -> Tensor:
    """T_v for tokens [rows, n] under keys [rows, 2]: independent Exp(1), float64 [rows, n]."""
    blocks = tokens // BLOCK
    later = _exponential(_hash(keys, tokens * 2))
    is_first = tokens - blocks * BLOCK == _place(keys, blocks)
    return _block_first(keys, blocks) + later.masked_fill_(is_first, 0.0)


def race(logits: Tensor, keys: Tensor) -> Tensor:
    """The winner of each row: argmax_v(logits_v - log T_v), an exact draw from softmax(logits).

    Args:
        logits: [rows, vocab], float; -inf removes a token.
        keys: [rows, 2] from `race_keys`.

    Returns:
        int64 [rows]. A row's winner depends on that row alone.
    """
    vocab = logits.shape[1]
    count = math.ceil(vocab / BLOCK)
    blocked = logits if vocab == count * BLOCK else functional.pad(logits, (0, count * BLOCK - vocab), value=-math.inf)
    blocked = blocked.view(-1, count, BLOCK)
    index = torch.arange(count, device=logits.device)[None]
    gain = -_block_first(keys, index).log_()
    bound = blocked.amax(dim=2) + gain

    # The likeliest tokens and the first arrival of each block give a score to beat (the former when the law is peaked,
    # the latter when it is flat); the winner is in a block whose bound reaches it.
    likely, tokens = logits.topk(min(LIKELY, vocab), dim=1)
    firsts = blocked.gather(2, _place(keys, index)[:, :, None])[:, :, 0] + gain
    floor = torch.maximum((likely - arrivals(keys, tokens).log_()).amax(dim=1), firsts.amax(dim=1))
    opened = int((bound >= floor[:, None]).sum(dim=1).max())

    chosen = bound.topk(opened, dim=1).indices[:, :, None]
    tokens = (chosen * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    candidates = blocked.gather(1, chosen.expand(-1, -1, BLOCK)).flatten(1)
    place = (candidates - arrivals(keys, tokens).log_()).argmax(dim=1, keepdim=True)
    return tokens.gather(1, place)[:, 0]
