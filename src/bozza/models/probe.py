"""Whether a model may run ragged is measured when it is loaded; its flags and its name are not trusted.

Two short sequences go through chunked prompts, a wrong chain, a tree with an accepted branch, and rollbacks, all mixed
in the same passes, and every logit must agree with a plain forward pass of the same model. A model that keeps state
outside of attention, or does not use the given attention, fails by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bozza.core import Draft
from bozza.errors import UnsupportedModel, first_line
from bozza.models.compiling import compile_layers
from bozza.models.invariance import check_invariant
from bozza.models.runner import RaggedRunner, Row
from bozza.native.attention import attention_kernel
from bozza.native.products import use_native_products

LAYER_TYPES = {"full_attention", "sliding_attention"}
MOVING_ROPE = {"dynamic", "longrope"}  # frequencies change with the longest position of a whole pass
FLOOR = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative error that is always allowed; other dtypes: 3e-2
NOISE_FACTOR = 8.0  # otherwise this many times the rounding that plain passes of other lengths show


def load_runner(model: Any, invariant: bool = False, compiled: bool = False) -> RaggedRunner:
    """A runner for a loaded transformers model that has passed the probe.

    With `invariant`, also one whose logits do not depend on the shape of a pass, as far as `check_invariant` sees. With
    `compiled`, its layers and attention are compiled (`bozza.models.compiling`, `bozza.native`) and probed once more.

    Raises:
        UnsupportedModel: the model cannot run ragged, or gives other numbers when it does.
        ModelError: it is to be invariant or compiled and cannot be, on this machine.
    """
    if reason := _declared_obstacle(model):
        raise _refusal(model, f": {reason}")
    model.eval()
    runner = RaggedRunner(model, invariant)
    _check(runner, model)
    if compiled:
        use_native_products(model)
        compile_layers(runner, model)
        runner.kernel = attention_kernel()
        _check(runner, model)
    if invariant:
        check_invariant(runner)
    return runner


def _check(runner: RaggedRunner, model: Any) -> None:
    try:
        error, bound = probe(runner, model)
    except UnsupportedModel as problem:
        raise _refusal(model, f": {problem}") from problem
    except Exception as problem:  # any failure of unknown modelling code means the same to a user
        raise _refusal(model, f" ({first_line(problem)})") from problem
    if runner.store.layers < model.config.get_text_config(decoder=True).num_hidden_layers:
        raise _refusal(model, ": not all of its layers use the attention interface")
    if not error <= bound:
        raise UnsupportedModel(
            f"{type(model).__name__} gives other logits in ragged passes (relative error {error:.1e}, allowed "
            f"{bound:.1e}); use transformers' generate for it"
        )


def _refusal(model: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} cannot run in ragged passes{why}; use transformers' generate for it"
    )


def _declared_obstacle(model: Any) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state"
    if unknown := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"it has layers of type {', '.join(sorted(unknown))}"
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in MOVING_ROPE:
            return f"its {parameters['rope_type']} positions depend on what shares a pass"
    return None


@torch.inference_mode()
def probe(runner: RaggedRunner, model: Any) -> tuple[float, float]:
    """Largest relative error of ragged against plain logits, and the bound that it has to keep."""
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(1, runner.vocab_size, (n,), generator=generator).tolist() for n in (24, 15))
    plain_long, plain_short = _plain(model, long), _plain(model, short)
    noise = max(_error(_plain(model, long[:n])[-1], plain_long[n - 1]) for n in (1, 7, 16))
    bound = max(NOISE_FACTOR * noise, FLOOR.get(runner.dtype, 3e-2))

    a, b = runner.alloc(), runner.alloc()
    error = 0.0

    def check(rows: Sequence[Row], expected: Sequence[tuple[int, Tensor]]) -> None:
        nonlocal error
        logits = runner.forward(rows).logits
        error = max(error, *(_error(logits[row], plain) for row, plain in expected))

    try:
        wrong = [(token + 1) % runner.vocab_size for token in long]
        check([Row(a, long[:8]), Row(b, short[:3])], [(0, plain_long[7]), (1, plain_short[2])])
        # A wrong chain beside a plain row; the wrong tokens are rolled back.
        rows = [Row(b, short[3:4]), Row(a, long[8:9], Draft.chain(wrong[9:12], "probe"))]
        check(rows, [(0, plain_short[3]), (1, plain_long[8])])
        runner.truncate(a, 9)
        # A tree whose second branch is right, beside a prompt chunk; the branch is kept.
        tree = Draft((wrong[10], long[10], wrong[11], long[11]), (-1, -1, 0, 1), ("probe",) * 4)
        rows = [Row(a, long[9:10], tree), Row(b, short[4:9], wanted=0)]
        check(rows, [(0, plain_long[9]), (2, plain_long[10]), (4, plain_long[11])])
        runner.keep(a, 10, (1, 3))
        check([Row(a, long[12:13]), Row(b, short[9:10])], [(0, plain_long[12]), (1, plain_short[9])])
        check([Row(b, short[10:]), Row(a, long[13:])], [(0, plain_short[-1]), (1, plain_long[-1])])
    finally:
        runner.free(a)
        runner.free(b)
    return error, bound


def _plain(model: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
    return logits


def _error(logits: Tensor, plain: Tensor) -> float:
    """Largest difference, relative to the spread of the plain logits; infinite where one is not a number."""
    error = float((logits - plain).abs().max() / (plain - plain.mean()).abs().max())
    return error if error == error else float("inf")
