"""Catches a hook that ships another layer's input than its own, that fires again when activations are recomputed, that takes a
forward for a microbatch which is none, that misses one, or through which the draft's loss would reach the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.builders import generator
from trainer_bridge.errors import TapOrderError, TapShapeError
from trainer_bridge.taps.hooks import ChunkHooks, ChunkView

HIDDEN, LAYERS, FIRST = 4, 5, 10
"""The chunk's layers are numbers 10 to 14 of the model."""
TAPPED = (10, 12, 13)
RECOMPUTED = {
    "nothing": (None, None),
    "layers, reentrant": ("layers", True),
    "layers": ("layers", False),
    "the chunk, reentrant": ("chunk", True),
    "the chunk": ("chunk", False),
}


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator(seed)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden_states @ self.weight)


class Chunk(nn.Module):
    """The last of a model; `order` says which of its layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed) for seed in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.order = list(range(LAYERS))
        self.reentrant: bool | None = None
        self.by_keyword = False
        self.norms = 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            layer = self.layers[index]
            if self.reentrant is not None:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
            elif self.by_keyword:
                hidden = layer(hidden_states=hidden)
            else:
                hidden = layer(hidden)
        for _ in range(self.norms):
            hidden = self.norm(hidden)
        return hidden


class Record:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.tensors: list[torch.Tensor] = []

    def tap(self, microbatch: int, place: int, rows: torch.Tensor) -> None:
        self.calls.append(("tap", microbatch, place))
        self.tensors.append(rows)

    def final(self, microbatch: int, rows: torch.Tensor) -> None:
        self.calls.append(("final", microbatch, 0))
        self.tensors.append(rows)

    def end(self, microbatch: int) -> None:
        self.calls.append(("end", microbatch, 0))


def hooked(chunk: Chunk, *, final: bool = True, **options: Any) -> tuple[ChunkHooks, Record]:
    sink, norm = Record(), chunk.norm if final else None
    layers = {FIRST + index: layer for index, layer in enumerate(chunk.layers)}
    return ChunkHooks(ChunkView(chunk=3, module=chunk, layers=layers, final_norm=norm, **options), TAPPED, sink), sink


def inputs(count: int) -> list[torch.Tensor]:
    """Of microbatches: two documents of three tokens each."""
    return [torch.randn(2, 3, HIDDEN, generator=generator(50 + index)).requires_grad_() for index in range(count)]


def calls_of(*microbatches: int) -> list[tuple[str, int, int]]:
    """What a sink hears of them."""
    return [call for m in microbatches for call in (("tap", m, 0), ("tap", m, 1), ("tap", m, 2), ("final", m, 0), ("end", m, 0))]


def states_of(chunk: Chunk, microbatch: torch.Tensor) -> list[torch.Tensor]:
    """Inputs of the tapped layers and the normed state, by hand, as rows."""
    with torch.no_grad():
        states = [microbatch]
        for layer in chunk.layers:
            states.append(torch.tanh(states[-1] @ layer.weight))
        found = [states[layer - FIRST] for layer in TAPPED]
        return [state.reshape(-1, HIDDEN) for state in [*found, torch.layer_norm(states[-1], (HIDDEN,))]]


def train(chunk: Chunk, what: list[torch.Tensor], recompute: str) -> list[torch.Tensor]:
    """Forwards and backwards in turns, as in 1F1B; the gradients of all parameters and inputs."""
    part, reentrant = RECOMPUTED[recompute]
    chunk.zero_grad()
    chunk.reentrant = reentrant if part == "layers" else None
    run = (lambda x: checkpoint(chunk, x, use_reentrant=reentrant)) if part == "chunk" else chunk
    outputs: list[torch.Tensor] = []

    def backward() -> None:
        (outputs.pop(0) ** 2).sum().backward()

    for index, microbatch in enumerate(what):
        outputs.append(run(microbatch))
        if index:
            backward()
    backward()
    found = [tensor.grad.clone() for tensor in (*chunk.parameters(), *what) if tensor.grad is not None]
    assert len(found) == LAYERS + 2 + len(what)
    for microbatch in what:
        microbatch.grad = None
    return found


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_every_microbatch_gives_its_taps_once_whatever_is_recomputed(recompute: str) -> None:
    chunk, what = Chunk(), inputs(4)
    alone = train(chunk, what, recompute)
    hooks, sink = hooked(chunk)
    for _ in range(2):
        sink.calls.clear()
        sink.tensors.clear()
        hooks.begin(4)
        gradients = train(chunk, what, recompute)
        hooks.end()
        assert sink.calls == calls_of(0, 1, 2, 3)
        for found, wanted in zip(sink.tensors, [state for one in what for state in states_of(chunk, one)], strict=True):
            assert torch.equal(found, wanted)
            assert not found.requires_grad
        # The policy learns what it learns without them, bit for bit.
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, alone, strict=True))


def test_a_chunk_that_is_not_the_last_has_no_final_state() -> None:
    chunk = Chunk()
    hooks, sink = hooked(chunk, final=False)
    hooks.begin(1)
    chunk(inputs(1)[0])
    hooks.end()
    assert sink.calls == [call for call in calls_of(0) if call[0] != "final"]


def test_hidden_states_may_be_a_keyword_and_lie_as_the_policy_wants() -> None:
    """As megatron-core has them: [length, documents, hidden]."""
    chunk, what = Chunk(), inputs(1)[0]
    chunk.by_keyword = True
    hooks, sink = hooked(chunk, rows=lambda hidden: hidden.transpose(0, 1).flatten(0, 1))
    hooks.begin(1)
    chunk(what)
    hooks.end()
    plain = [state.view(2, 3, HIDDEN).transpose(0, 1).flatten(0, 1) for state in states_of(chunk, what)]
    assert all(torch.equal(found, wanted) for found, wanted in zip(sink.tensors, plain, strict=True))


def test_nothing_reaches_the_policy_through_a_tap() -> None:
    """Case A15: what the draft makes of them leaves the policy's gradient alone."""
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    hooks.begin(1)
    chunk(what)
    loss = torch.stack([tensor.requires_grad_().square().sum() for tensor in sink.tensors]).sum()
    loss.backward()
    assert what.grad is None and all(parameter.grad is None for parameter in chunk.parameters())


def test_forwards_outside_of_a_step_are_nobodys_business() -> None:
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    chunk(what)
    hooks.begin(1)
    chunk(what)
    hooks.end()
    chunk(what)
    hooks.begin(2)
    hooks.abort()
    chunk(what)
    assert sink.calls == calls_of(0)


def test_forwards_that_are_no_microbatch_do_not_count() -> None:
    """A schedule runs its chunks to learn about shapes."""
    chunk, what, counts = Chunk(), inputs(3), [False, True, False, True]
    hooks, sink = hooked(chunk, counts=lambda: counts.pop(0))
    hooks.begin(2)
    for index in (2, 0, 2, 1):
        chunk(what[index])
    hooks.end()
    assert sink.calls == calls_of(0, 1) and not counts
    assert torch.equal(sink.tensors[4], states_of(chunk, what[1])[0])


def test_one_forward_too_many_and_one_too_few_are_named() -> None:
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    hooks.begin(2)
    chunk(what)
    with pytest.raises(TapOrderError, match="chunk 3 ran 1 of 2 microbatches forward"):
        hooks.end()
    hooks.begin(1)
    chunk(what)
    with pytest.raises(TapOrderError, match="chunk 3 runs forward more often than this step has microbatches, 1"):
        chunk(what)
    hooks.end()
    assert sink.calls == calls_of(0, 0)


def orders(order: list[int], norms: int = 1) -> Callable[[Chunk], None]:
    def change(chunk: Chunk) -> None:
        chunk.order, chunk.norms = order, norms

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(orders([0, 1, 2, 4]), id="a tapped layer is skipped"),
        pytest.param(orders([0, 1, 2, 2, 3, 4]), id="a tapped layer runs twice"),
        pytest.param(orders([0, 1, 2, 2, 4]), id="one is skipped and one runs twice"),
        pytest.param(orders([0, 1, 3, 2, 4]), id="tapped layers change places"),
        pytest.param(orders([0, 1, 2, 3, 4], norms=0), id="no final norm"),
        pytest.param(orders([0, 1, 2, 3, 4], norms=2), id="the final norm runs twice"),
        pytest.param(orders([0, 1, 2, 4], norms=2), id="a layer less and a norm more"),
    ],
)
def test_a_chunk_that_runs_other_layers_is_named(change: Callable[[Chunk], None]) -> None:
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    change(chunk)
    hooks.begin(1)
    with pytest.raises(TapShapeError, match=r"chunk 3: .*has to run exactly once"):
        chunk(what)
    assert ("end", 0, 0) not in sink.calls


def test_layers_that_are_not_tapped_may_run_as_they_like() -> None:
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    chunk.order = [0, 1, 1, 2, 3]
    hooks.begin(1)
    chunk(what)
    hooks.end()
    assert sink.calls == calls_of(0)


def test_a_forward_that_fails_is_its_callers_and_a_later_step_works_again() -> None:
    chunk, what = Chunk(), inputs(2)
    hooks, sink = hooked(chunk)
    hooks.begin(2)
    chunk(what[0])
    chunk.order = [0, 1, 99]
    with pytest.raises(IndexError):
        chunk(what[1])
    # Between the failed forward and the next one no layer's forward counts.
    chunk.layers[0](what[1])
    assert sink.calls == [*calls_of(0), ("tap", 1, 0)]
    chunk.order = list(range(LAYERS))
    with pytest.raises(TapOrderError, match="ran 1 of 2"):
        hooks.end()
    sink.calls.clear()
    sink.tensors.clear()
    hooks.begin(2)
    for one in what:
        chunk(one)
    hooks.end()
    assert sink.calls == calls_of(0, 1)
    assert torch.equal(sink.tensors[4], states_of(chunk, what[1])[0])


def test_closed_hooks_are_gone() -> None:
    chunk, what = Chunk(), inputs(1)[0]
    hooks, sink = hooked(chunk)
    hooks.begin(1)
    hooks.close()
    chunk(what)
    assert sink.calls == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in chunk.modules())
