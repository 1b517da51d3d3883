"""Replacing all weights of the served target inside a running engine, as a transaction that hardly stalls it.

The new weights are built aside (see `shadow`) in small pieces between the engine's steps: loaded and packed by vLLM's own
reload, and checked. Then, at a step boundary, the packed functions and tensors are put into the served modules, which stay the
same objects: the draft's embedding is the target's, and attention keeps its KV cache. What they replaced is handed out and
can be put back.

The tensor-parallel ranks build and put in each its own part; whether all of them succeeded is for the caller to find out.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from vllm_specdraft.served import fused_into, off_by, tolerance_of
from vllm_specdraft.shadow import ABSENT, Entries, Shadow
from vllm_specdraft.shards import local_weight, whole_shapes

logger = logging.getLogger(__name__)

Reader = Callable[[], torch.Tensor]
"""Gives one whole tensor on the CPU, as it came over the wire."""

_LARGE_BYTES = 16 << 20
"""Layers from this size on are begun with almost a whole budget, not with what others left of it."""
_FRESH = 0.9
_NAMED = 8
"""Tensors that an error names; of the others it gives the number."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PolicySwapError(RuntimeError):
    """The new weights were not put in; the ones before them serve on."""


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """One parameter of a served layer."""

    leaf: str
    """Its name in the layer."""
    names: tuple[str, ...]
    """Names under which the model's loader takes its parts, in the order in which it lays them."""
    keys: tuple[str, ...]
    """Tensors of an update that are these parts. Other than `names` where the parameter is tied to another one."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parts, whole."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One served module that has parameters."""

    name: str
    parameters: tuple[_Parameter, ...]

    def elements(self) -> int:
        """Of its weights, whole."""
        return sum(prod(shape) for parameter in self.parameters for shape in parameter.shapes)

    def needed(self) -> list[str]:
        """Names of the tensors of an update that it is made of."""
        return [key for parameter in self.parameters for key in parameter.keys]


class Replaced:
    """Weights that served before, as they were packed. Dropping it frees them."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries


class Build:
    """One set of weights on its way. Dropping it before it is put in frees everything it made."""

    def __init__(self, shadow: Shadow, pieces: Generator[int | None, None, Entries], total: int) -> None:
        self.done = 0
        """Tensors built and checked."""
        self.total = total
        """Tensors that there are to build."""
        self._pieces: Generator[int | None, None, Entries] | None = pieces
        self._entries: Entries | None = None
        self._over = ""
        # Runs once: at the end of the building, or when this object goes.
        self._dissolve = weakref.finalize(self, shadow.dissolve)
        self._dissolve.atexit = False

    def step(self, budget_s: float) -> bool:
        """Build for about `budget_s` seconds, a layer's packing longer at most; a long piece waits for the next call.

        Returns:
            Whether everything is built and checked. Raises `PolicySwapError`; then this build is over.
        """
        if self._entries is not None:
            return True
        if self._pieces is None:
            raise PolicySwapError(self._over)
        began = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.no_grad():
                while True:
                    finished = next(self._pieces)
                    self.done += finished or 0
                    left = _FRESH if finished is None else 0.0
                    if time.perf_counter() - began >= (1 - left) * budget_s:
                        return False
        except StopIteration as end:
            self._entries = end.value
            self._end()
            return True
        except BaseException as error:
            self._end(f"these weights cannot be put in, building them failed: {error}")
            if isinstance(error, PolicySwapError) or not isinstance(error, Exception):
                raise
            raise PolicySwapError(f"the new weights could not be built: {type(error).__name__}: {error}") from error

    def _end(self, reason: str = "") -> None:
        self._pieces, self._over = None, reason
        self._dissolve()

    def entries(self) -> Entries:
        """What is to be put into the served modules. Raises `PolicySwapError` when it is not there yet, or no more."""
        if self._entries is None:
            raise PolicySwapError(self._over or f"these weights are not built yet: {self.done} of {self.total} tensors are")
        return self._entries

    def put_in(self) -> None:
        """These weights serve now, and nothing is held here any more."""
        self._entries, self._over = None, "these weights were put in before: build them again, or restore what replaced them"


class PolicySwap:
    """Replaces the target's weights in one model runner."""

    def __init__(self, runner: Any) -> None:
        """Args: runner: a vLLM V1 model runner; ``runner.get_model()`` is the target."""
        self._config = runner.vllm_config
        self._target: nn.Module = runner.get_model()
        self._layers: tuple[_Layer, ...] | None = None

    @property
    def largest(self) -> int:
        """Elements of the largest layer, whole; 0 before the first build."""
        return max((layer.elements() for layer in self._layers or ()), default=0)

    def build(self, weights: Sequence[tuple[str, Reader]]) -> Build:
        """Start to build a set of weights; nothing is read yet.

        Args:
            weights: every tensor of the target by its checkpoint name, in any order. They are read layer by layer, each when
                its turn comes (a tied embedding twice).

        Raises `PolicySwapError` when tensors are missing or nobody takes them.
        """
        if self._layers is None:
            # The largest first: they find room where the weights before the last ones lay, and the small ones fill what is left.
            self._layers = tuple(sorted(_layers_of(self._target), key=_Layer.elements, reverse=True))
        readers, wanted = dict(weights), {key for layer in self._layers for key in layer.needed()}
        if len(readers) < len(weights):
            twice = [name for name, count in Counter(name for name, _ in weights).items() if count > 1]
            raise PolicySwapError(f"the update holds {_some(twice)} more than once")
        if missing := wanted - readers.keys():
            raise PolicySwapError(f"the update lacks {_some(missing)}: send all weights of the target")
        unknown = readers.keys() - wanted
        if tied := unknown & {name for layer in self._layers for one in layer.parameters for name in one.names}:
            logger.warning("%s is left out: the served target ties it to its embedding, which decides", _some(tied))
        if unknown := unknown - tied:
            raise PolicySwapError(f"no served layer takes {_some(unknown)}: send the weights of the model that is served")
        with torch.inference_mode(False), torch.no_grad():
            try:
                shadow = Shadow(self._target)
            except Exception as error:
                raise PolicySwapError(f"the served target cannot be built a second time: {error}") from error
        return Build(shadow, _build(shadow, self._layers, {key: readers[key] for key in wanted}, self._config), len(wanted))

    def apply(self, build: Build) -> Replaced:
        """Serve what was built from the next step on; to be called between two steps.

        Returns:
            The weights that served until now. Raises `PolicySwapError` when the build is not finished or anything goes
            wrong; then they serve on, and the build can be tried again.
        """
        replaced = self._put(build.entries())
        build.put_in()
        return replaced

    def restore(self, replaced: Replaced) -> Replaced:
        """Serve earlier weights again from the next step on; to be called between two steps.

        Returns:
            The weights that served until now. Raises `PolicySwapError` when anything goes wrong; then they serve on.
        """
        return self._put(replaced._entries)

    def _put(self, entries: Entries) -> Replaced:
        try:
            return Replaced(_exchange(entries))
        except Exception as error:
            raise PolicySwapError(f"the weights before are back: {type(error).__name__}: {error}") from error


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:_NAMED]) + (f" and {len(first) - _NAMED} more" if len(first) > _NAMED else "")


def _layers_of(target: nn.Module) -> Iterable[_Layer]:
    """Every served module with parameters, in the order of the tree. Raises `PolicySwapError` for one that is quantized."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    first: dict[int, tuple[str, ...]] = {}
    for name, module in target.named_modules():
        parameters = []
        for leaf, value in module._parameters.items():
            if value is None:
                continue
            whole = f"{name}.{leaf}"
            shapes: tuple[tuple[int, ...], ...] = (tuple(value.shape),)
            if (method := getattr(module, "quant_method", None)) is not None:
                if not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
                    raise PolicySwapError(f"{name} is quantized ({type(method).__name__}): only plain weights can be replaced")
                shapes = whole_shapes(module, leaf)
            names = fused_into(whole) or (whole,)
            # A head that is tied to the embedding has the very same parameter. It is packed from the embedding's tensor, for
            # itself: vLLM's reload leaves it with the function it packed at the start.
            parameters.append(_Parameter(leaf=leaf, names=names, keys=first.setdefault(id(value), names), shapes=shapes))
        if parameters:
            yield _Layer(name=name, parameters=tuple(parameters))


def _build(
    shadow: Shadow, layers: Sequence[_Layer], readers: Mapping[str, Reader], config: Any
) -> Generator[int | None, None, Entries]:
    """Yields after each piece of work how many tensors it finished, None before a long one; returns what is to be put in."""
    built: set[str] = set()
    for layer in layers:
        if config.model_config.dtype.itemsize * layer.elements() >= _LARGE_BYTES:
            yield None
        given = {key: _read(key, readers[key], shape) for key, shape in _shapes(layer)}
        _load(shadow, layer, given, config)
        yield 0
        local = _local(shadow, layer, given)
        _check_function(shadow, layer, local)
        yield 0
        _check_values(shadow, layer, local)
        yield len(given.keys() - built)
        built.update(given)
    shadow.finish(config.model_config)
    return shadow.entries()


def _shapes(layer: _Layer) -> list[tuple[str, tuple[int, ...]]]:
    return [pair for one in layer.parameters for pair in zip(one.keys, one.shapes, strict=True)]


def _read(key: str, reader: Reader, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        tensor = reader()
    except Exception as error:
        raise PolicySwapError(f"{key} could not be read: {type(error).__name__}: {error}") from error
    # Said here: of a tensor that is too large, vLLM's loaders take the part they need.
    if tuple(tensor.shape) != shape:
        raise PolicySwapError(f"{key} has shape {tuple(tensor.shape)}, the served target takes {shape}")
    return tensor


def _load(shadow: Shadow, layer: _Layer, given: Mapping[str, torch.Tensor], config: Any) -> None:
    from vllm.config import set_current_vllm_config

    parts = [(name, given[key]) for one in layer.parameters for name, key in zip(one.names, one.keys, strict=True)]
    try:
        with set_current_vllm_config(config):
            loaded = shadow.load(layer.name, parts)
    except Exception as error:
        raise PolicySwapError(f"{layer.name} could not be loaded: {type(error).__name__}: {error}") from error
    wanted = {f"{layer.name}.{one.leaf}" for one in layer.parameters}
    if missed := wanted - loaded:
        raise PolicySwapError(f"nothing was loaded into {_some(missed)}")
    if not shadow.packed(layer.name):
        raise PolicySwapError(f"{layer.name} is still not whole with all of its tensors loaded: {_some(layer.needed())}")


def _local(shadow: Shadow, layer: _Layer, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By parameter, what this rank's layer should hold."""
    module, due = shadow.module(layer.name), {one.leaf: [given[key] for key in one.keys] for one in layer.parameters}
    return {leaf: local_weight(module, parts) if _is_linear(module) else parts[0] for leaf, parts in due.items()}


def _is_linear(module: Any) -> bool:
    return getattr(module, "quant_method", None) is not None


def _check_function(shadow: Shadow, layer: _Layer, local: Mapping[str, torch.Tensor]) -> None:
    """A linear layer must equal the given weights, and its bias, on fixed inputs. NaN passes where NaN was given."""
    module = shadow.module(layer.name)
    # A rank may hold nothing but padding of a vocabulary.
    if not _is_linear(module) or not (weight := local["weight"]).numel():
        return
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(module.params_dtype)
    bias = (module.bias, local["bias"]) if "bias" in local else None
    if not (error := off_by(module, x, weight, bias, nan=True)) <= tolerance_of(x.dtype):
        raise PolicySwapError(f"{layer.name} was built wrong: its outputs are off by {error:.3g}")


def _check_values(shadow: Shadow, layer: _Layer, local: Mapping[str, torch.Tensor]) -> None:
    """Whatever is held as it came must equal it bit by bit: norms, embeddings, biases."""
    module = shadow.module(layer.name)
    for leaf, wanted in local.items():
        found = module._parameters[leaf].data
        # An empty one was packed away; its function was checked.
        if found.numel() and not _same_bits(found[: len(wanted)], wanted.to(found.dtype)):
            raise PolicySwapError(f"{layer.name}.{leaf} was built wrong: it does not hold the given values")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # The widest integers that fit a row are compared fastest.
    row_bytes = a.shape[-1] * a.element_size()
    bits = torch.int64 if row_bytes % 8 == 0 else _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _exchange(entries: Entries) -> Entries:
    """Put attributes into modules; what was there. On any error everything is as it was."""
    before: Entries = []
    try:
        for module, values in entries:
            before.append((module, {key: vars(module).get(key, ABSENT) for key in values}))
            _put_into(module, values)
    except BaseException:
        for module, values in reversed(before):
            _put_into(module, values)
        raise
    return before


def _put_into(module: nn.Module, values: Mapping[str, Any]) -> None:
    own = vars(module)
    for key, value in values.items():
        if value is ABSENT:
            own.pop(key, None)
        else:
            own[key] = value
