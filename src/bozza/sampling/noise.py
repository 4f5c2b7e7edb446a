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
LIKELY = 8  # blocks whose likeliest tokens give a score to beat
_MASK = 0xFFFFFFFF


def race_keys(seeds_and_positions: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """One pair of 32-bit keys per (seed, output position), as int64 [rows, 2]."""
    keys = []
    for seed, position in seeds_and_positions:
        digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
        keys.append((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")))
    return torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 2)


def _hash(keys: Tensor, index: Tensor) -> Tensor:
    """Uniform 32-bit integers (held in int64) for keys [rows, 2] and index [rows or 1, n].

    For each key a bijection of 32-bit integers: xor-shifts and multiplications by odd numbers, with the key's second
    half between them, so that two keys give unrelated sequences.
    """
    x = index ^ keys[:, :1]
    x ^= x >> 16
    x.mul_(0x21F0AAAD).bitwise_and_(_MASK).bitwise_xor_(keys[:, 1:])
    x ^= x >> 15
    x.mul_(0xD35A2D97).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(0x846CA68B).bitwise_and_(_MASK)
    x ^= x >> 16
    return x


def _exponential(bits: Tensor, count: int) -> Tensor:
    """Exp(1) from `count` uniform bits, float64; log1p keeps small arrivals, the ones that win, exact."""
    return bits.double().add_(0.5).mul_(-(2.0**-count)).log1p_().neg_()


def _blocks(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Earliest arrival of each block, Exp(64), and its place in the block, uniform in 0..63.

    The place is the top 6 bits of a hash, the arrival the other 26. Odd indices are for blocks, even ones for tokens.
    """
    bits = _hash(keys, blocks * 2 + 1)
    return _exponential(bits & 0x3FFFFFF, 26).div_(BLOCK), bits >> 26


def arrivals(keys: Tensor, tokens: Tensor) -> Tensor:
    """T_v for tokens [rows, n] under keys [rows, 2]: independent Exp(1), float64 [rows, n]."""
    blocks = tokens // BLOCK
    first, place = _blocks(keys, blocks)
    later = _exponential(_hash(keys, tokens * 2), 32)
    return first.add_(later.masked_fill_(tokens - blocks * BLOCK == place, 0.0))


def race(logits: Tensor, keys: Tensor, temperature: float = 1.0) -> Tensor:
    """The winner of each row: argmax_v(logits_v / temperature - log T_v), an exact draw from that softmax.

    Args:
        logits: [rows, vocab], float; -inf removes a token.
        keys: [rows, 2] from `race_keys`.
        temperature: positive. Only the logits that are looked at are divided by it.

    Returns:
        int64 [rows]. A row's winner depends on that row alone.
    """
    rows, vocab = logits.shape
    count = math.ceil(vocab / BLOCK)
    blocked = logits if vocab == count * BLOCK else functional.pad(logits, (0, count * BLOCK - vocab), value=-math.inf)
    blocked = blocked.view(rows, count, BLOCK)
    first, place = _blocks(keys, torch.arange(count, device=logits.device)[None])
    gain = first.log_().neg_()
    likeliest = blocked.amax(dim=2) / temperature

    # Two kinds of tokens give a score to beat: the first arrivals of the blocks, good where the law is flat, and the
    # likeliest tokens, good where it is peaked. The winner is in a block whose bound reaches that score.
    known = (blocked.gather(2, place[:, :, None])[:, :, 0] / temperature + gain).amax(dim=1)
    chosen = likeliest.topk(min(LIKELY, count), dim=1).indices
    likely, offset = blocked.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).max(dim=2)
    known = torch.maximum(known, (likely / temperature - arrivals(keys, chosen * BLOCK + offset).log_()).amax(dim=1))
    row, block = ((likeliest + gain) >= known[:, None] - 1e-9).nonzero(as_tuple=True)

    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    scores, best = (blocked[row, block] / temperature - arrivals(keys[row], tokens).log_()).max(dim=1)
    row_best = scores.new_full((rows,), -math.inf).scatter_reduce_(0, row, scores, "amax")
    winners = torch.zeros(rows, dtype=torch.int64, device=logits.device)  # what a row of NaN gets
    won = scores == row_best[row]
    winners[row[won]] = (block * BLOCK + best)[won]
    return winners
