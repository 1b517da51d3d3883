"""Taps read where a policy computes them: hooks on its layers, armed only while a chunk runs forward.

Activation recomputation runs forwards again inside the backward, of layers or of a whole chunk: nothing is armed then, and nothing
fires twice.
Microbatches are counted per chunk, in the order in which its forwards come, which is ascending in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainer_bridge.errors import TapOrderError, TapShapeError

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states as the policy holds them to rows ``[rows, hidden]``, documents one behind the other."""


@dataclass(frozen=True, kw_only=True)
class ChunkView:
    """What an adapter says of a chunk: one of the model's consecutive parts, all of it where nothing is split."""

    chunk: int
    """Counted over the whole model, from 0."""
    module: nn.Module
    """Its forward is the chunk's."""
    layers: Mapping[int, nn.Module]
    """Decoder layers by their number in the whole model, from 0."""
    final_norm: nn.Module | None = None
    """The last chunk's: its output is what the head reads."""
    rows: Rows = lambda hidden: hidden.flatten(0, -2)
    counts: Callable[[], bool] = lambda: True
    """Whether the forward that begins is of a microbatch: a trainer may run others to learn about shapes."""


class Sink(Protocol):
    """Where the taps of one chunk go."""

    def tap(self, microbatch: int, place: int, rows: torch.Tensor) -> None:
        """The tap layer at `place` of the chunk's, ``[rows, hidden]``, detached; they come in order."""

    def final(self, microbatch: int, rows: torch.Tensor) -> None:
        """Of the last chunk, ``[rows, hidden]``: what its head reads; after its taps."""

    def end(self, microbatch: int) -> None:
        """The chunk's forward is over."""


class ChunkHooks:
    """Hooks on one chunk. Without a step between `begin` and `end` they do nothing."""

    def __init__(self, view: ChunkView, tap_layers: Sequence[int], sink: Sink) -> None:
        """`tap_layers`: those of this chunk, ascending."""
        self.view, self._sink, self._taps = view, sink, len(tap_layers)
        final = [] if view.final_norm is None else ["the final norm"]
        self._turns = [*(f"layer {layer}" for layer in tap_layers), *final, "the chunk's end"]
        self._expected = self._next = 0
        self._running = False
        self._seen = 0
        self._handles = [
            view.module.register_forward_pre_hook(self._chunk_begins),
            view.module.register_forward_hook(self._chunk_ends, always_call=True),
            *(
                view.layers[layer].register_forward_pre_hook(self._layer(place), with_kwargs=True)
                for place, layer in enumerate(tap_layers)
            ),
        ]
        if view.final_norm is not None:
            self._handles.append(view.final_norm.register_forward_hook(self._final))

    def begin(self, microbatches: int) -> None:
        """The next so many forwards of the chunk are a step's."""
        self._expected, self._next, self._running = microbatches, 0, False

    def end(self) -> None:
        """Raise `TapOrderError` when the step had another number of forwards than it was said to have."""
        expected, self._expected = self._expected, 0
        if self._next != expected:
            raise TapOrderError(f"chunk {self.view.chunk} ran {self._next} of {expected} microbatches forward")

    def abort(self) -> None:
        """Forget the step."""
        self._expected, self._running = 0, False

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _chunk_begins(self, module: nn.Module, arguments: Any) -> None:
        if not self._expected or _in_backward() or not self.view.counts():
            return
        if self._next == self._expected:
            raise TapOrderError(
                f"chunk {self.view.chunk} runs forward more often than this step has microbatches, {self._expected}: finish it"
            )
        self._running, self._seen = True, 0

    def _chunk_ends(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not self._running:
            return
        self._running = False
        if output is None:
            # The forward failed: whoever called it hears of that.
            return
        self._comes(len(self._turns) - 1)
        microbatch, self._next = self._next, self._next + 1
        self._sink.end(microbatch)

    def _comes(self, place: int) -> None:
        """Raise `TapShapeError` when it is another one's turn: a layer that ran twice would stand in for one that did not."""
        if place != self._seen:
            raise TapShapeError(
                f"chunk {self.view.chunk}: {self._turns[place]} came in the turn of {self._turns[self._seen]}; each of the tapped "
                "layers has to run exactly once, in order"
            )

    def _layer(self, place: int) -> Callable[..., None]:
        def reads(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if self._running:
                self._comes(place)
                hidden = arguments[0] if arguments else keywords["hidden_states"]
                self._seen += 1
                self._sink.tap(self._next, place, self.view.rows(hidden.detach()))

        return reads

    def _final(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._running:
            self._comes(self._taps)
            self._seen += 1
            self._sink.final(self._next, self.view.rows((output[0] if isinstance(output, tuple) else output).detach()))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
