"""Decoder layers compiled by torch, for any architecture: the small operations around products and attention melt.

All layers of a kind share one graph, in which products and attention remain calls. Torch would look the graph up and
enter it in each layer of each pass, which costs what was won (docs/log.md). So each layer is traced with two lengths,
which shows what changes from pass to pass, and from then on the compiled function is called by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bozza.errors import ModelError, first_line
from bozza.models.attention import is_ragged
from bozza.models.runner import RaggedRunner, Row
from bozza.models.sharing import PackedLinear

LENGTHS = 11, 301  # tokens of the passes that are traced
UNLIMITED = 1 << 30  # transformers' layers share code, so models in one process would share torch's limit
KINDS = 8  # most graphs of a model; each takes seconds


class Call(NamedTuple):
    """A call of compiled code while a layer is traced."""

    function: Callable[..., Any]
    inputs: Sequence[Any]


class Recorder:
    """A backend for `torch.compile` that compiles as its own does and notes what is called with what."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._graphs = 0

    def __call__(self, graph: Any, examples: Sequence[Any]) -> Callable[..., Any]:
        """See `torch.compile`."""
        self._graphs += 1
        if self._graphs > KINDS:
            raise ModelError(f"its layers are of more than {KINDS} kinds")
        from torch._inductor.compile_fx import compile_fx

        # Values between melted operations are rounded as they would be in memory.
        function: Any = compile_fx(graph, examples, config_patches={"emulate_precision_casts": True})

        def noting(*inputs: Any) -> Any:
            self._calls.append(Call(function, inputs))
            return function(*inputs)

        return noting

    def only_call(self) -> Call:
        """The one call since the last time.

        Raises:
            ModelError: there were none or several.
        """
        calls, self._calls = self._calls, []
        if len(calls) != 1:
            raise ModelError(f"a layer became {len(calls)} graphs")
        return calls[0]


class CompiledForward:
    """Stands for the `forward` of a decoder layer: compiled code in ragged passes, the layer's own elsewhere."""

    def __init__(self, layer: nn.Module, recorder: Recorder) -> None:
        self._plain = layer.forward
        self._recorder = recorder
        self._trace = torch.compile(layer.forward, backend=recorder, fullgraph=True)
        self._before: tuple[Call, int] | None = None  # and the number of tokens
        self._function: Callable[..., Any] | None = None
        self._inputs: list[Any] = []
        self._changing: list[tuple[int, int]] = []  # inputs that the layer is given, and which of its tensors they are
        self._counts: list[int] = []  # inputs that are the number of tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer."""
        if not is_ragged():
            return self._plain(*args, **kwargs)
        tensors = _tensors([*args, *kwargs.values()])
        if self._function is None:
            return self._learn(tensors, args, kwargs)
        inputs = self._inputs.copy()
        for place, which in self._changing:
            inputs[place] = tensors[which]
        for place in self._counts:
            inputs[place] = tensors[0].shape[1]
        return self._function(*inputs)[0]

    def _learn(self, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The first two calls."""
        tokens = tensors[0].shape[1]
        for tensor in tensors:
            if tensor.dim() > 1 and tensor.shape[1] == tokens:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        result = self._trace(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise ModelError("a layer gives more than one tensor")
        call = self._recorder.only_call()
        if self._before is None:
            self._before = call, tokens
        else:
            self._compare(*self._before, call, tokens, tensors)
            self._before = None
        return result

    def _compare(self, before: Call, fewer: int, call: Call, tokens: int, tensors: Sequence[Tensor]) -> None:
        """Tell which inputs of the function change from pass to pass."""
        if before.function is not call.function or fewer == tokens:
            raise ModelError("a layer's graph depends on the number of tokens")
        inputs = list(call.inputs)
        for place, (old, new) in enumerate(zip(before.inputs, call.inputs, strict=True)):
            which = next((index for index, tensor in enumerate(tensors) if tensor is new), None)
            if which is not None:
                self._changing.append((place, which))
                inputs[place] = None
            elif isinstance(new, int) and (old, new) == (fewer, tokens):
                self._counts.append(place)
            elif not (old is new or (isinstance(new, int) and old == new)):
                raise ModelError("a layer's graph takes something else that changes from pass to pass")
        self._function, self._inputs = call.function, inputs


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among them, and in the tuples among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def compile_layers(runner: RaggedRunner, model: Any) -> None:
    """Compile the decoder layers of a model that Bozza loaded and packed. It takes seconds and a C++ compiler.

    Other roundings than before are to be expected, the same ones in every pass.

    Raises:
        ModelError: it cannot be done; the model is as it was then.
    """
    layers, recorder = _decoder_layers(model), Recorder()
    ids = torch.randint(1, runner.vocab_size, LENGTHS[-1:], generator=torch.Generator().manual_seed(0)).tolist()
    try:
        for layer in layers:
            layer.forward = CompiledForward(layer, recorder)
        with _one_graph():
            for length in LENGTHS:
                slot = runner.alloc()
                try:
                    runner.forward([Row(slot, ids[: min(length, runner.context_length)], wanted=0)])
                finally:
                    runner.free(slot)
    except Exception as problem:  # of torch's compiler or a C++ compiler: all mean the same here
        for layer in layers:
            layer.__dict__.pop("forward", None)
        raise ModelError(f"{type(model).__name__} cannot be compiled ({_reason(problem)}): drop compile") from problem


@contextmanager
def _one_graph() -> Iterator[None]:
    """Within, the numbers of layers are no part of their graphs, and other numbers are. Torch's asides are not told."""
    dynamo: Any = torch._dynamo.config
    compiler: Any = torch.compiler.config
    with (
        dynamo.patch(allow_unspec_int_on_nn_module=True, specialize_float=True, recompile_limit=UNLIMITED),
        dynamo.patch(accumulated_recompile_limit=UNLIMITED),
        compiler.patch(dynamic_sources=".*layer_idx"),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def _decoder_layers(model: Any) -> list[Any]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            layers = list(module)
            if all(any(isinstance(part, PackedLinear) for part in layer.modules()) for layer in layers):
                return layers
    raise ModelError(
        "compile is for packed layers: in bfloat16, on a CPU with AVX-512 or better; here are none: drop compile"
    )


def _reason(problem: Exception) -> str:
    cause = getattr(problem, "inner_exception", problem)
    if type(cause).__name__ == "InvalidCxxCompiler":
        return "there is no C++ compiler: install g++ or clang"
    return str(cause) if isinstance(cause, ModelError) else first_line(cause)
