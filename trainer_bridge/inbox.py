"""What an engine holds of the weights that come: one staging memory, checked piece by piece, and the version that lies in it whole.

After a commit the memory holds exactly that version: the base of later deltas, and what a partial update leaves as it is. A full
update overwrites it; when it is aborted half-way there is no base until the next full one. Aborted deltas are taken back. No
sockets here, and no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_bridge import delta
from trainer_bridge.digest import digest_and_check, tensor_digest
from trainer_bridge.errors import BaseVersionError, PlanError
from trainer_bridge.plan import ITEM_BYTES, Coverage, Extents, Layout, Plan
from trainer_bridge.staging import Staging
from trainer_bridge.wire import DRAFT, MODELS, TARGET, Offer, Piece

_NAMES_SHOWN = 5
KEPT_BYTES = 64 << 10
"""Largest whole piece of a delta update whose old content is kept until the commit: small tensors are no smaller as deltas."""


@dataclass(kw_only=True)
class _Open:
    """The update that is being staged."""

    offer: Offer
    layout: Layout
    coverage: Coverage
    arrived: int = 0
    received_bytes: int = 0
    check_s: float = 0.0
    undo: list[Callable[[], None]] = field(default_factory=list)
    boxes: dict[tuple[int, int], dict[tuple[Extents, Extents], bytes]] = field(default_factory=dict)
    """Per tensor, digests of the boxes that came."""
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Of whole tensors, once verified."""


class Inbox:
    """Staging memory and what is known of it."""

    def __init__(self, plan: Plan, staging: Staging) -> None:
        self.plan, self.staging = plan, staging
        self.base_version: int | None = None
        """Policy version whose target lies in the memory whole."""
        self.base_dtypes: tuple[str, str] = ("plan", "plan")
        self._digests: dict[tuple[int, int], bytes] = {}
        """Of every tensor that lies in the memory whole."""
        self._open: _Open | None = None

    def open(self, offer: Offer) -> Layout:
        """Make room for an update. Raises `PlanError`, `BaseVersionError` or `ConfigError`; then none is open."""
        layout = Layout.of(self.plan, offer.dtypes)
        if offer.base_version is not None and (offer.base_version, offer.dtypes) != (self.base_version, self.base_dtypes):
            held = "none" if self.base_version is None else f"version {self.base_version} as {', '.join(self.base_dtypes)}"
            raise BaseVersionError(
                f"deltas against version {offer.base_version} as {', '.join(offer.dtypes)}: the engine holds {held}; send it whole"
            )
        if offer.dtypes != self.base_dtypes or layout.nbytes > self.staging.nbytes:
            self._forget()
            self.staging.ensure(layout.nbytes)
        self._open = _Open(offer=offer, layout=layout, coverage=Coverage(self.plan))
        if offer.base_version is None and offer.carrier == "shm" and not offer.partial:
            # From here on the trainer may write whenever it likes.
            self._forget()
        return layout

    @property
    def arrived(self) -> int:
        """Pieces of the open update that arrived and passed their checks."""
        return self._opened.arrived

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise PlanError("no update is open")
        return self._open

    def box(self, piece: Piece) -> np.ndarray:
        """Where a full piece belongs in the memory. Raises `PlanError`."""
        opened = self._opened
        box = opened.layout.box(self.staging.memory, piece)
        if not piece.delta and piece.nbytes != opened.layout.box_bytes(piece):
            raise PlanError(f"{self._name(piece)}: {piece.nbytes} bytes for a box of {opened.layout.box_bytes(piece)}")
        return box

    def put(self, piece: Piece, payload: np.ndarray) -> None:
        """Write a piece's payload ``[nbytes]`` uint8 into the memory and check it. Raises `PlanError` or `DeltaError`."""
        box = self.box(piece)
        if payload.size != piece.nbytes:
            raise PlanError(f"{self._name(piece)}: {payload.size} bytes of payload, its header says {piece.nbytes}")
        if piece.delta:
            self._put_delta(piece, box, payload)
        else:
            self.overwrites(piece)
            box[...] = payload.view(box.dtype).reshape(box.shape)
        self.check(piece)

    def _put_delta(self, piece: Piece, box: np.ndarray, payload: np.ndarray) -> None:
        if self._opened.offer.base_version is None or (piece.model, piece.tensor) not in self._digests:
            raise PlanError(f"{self._name(piece)}: a delta, and the engine holds no base of it; send it whole")
        if not box.flags.c_contiguous:
            raise PlanError(f"{self._name(piece)}: a delta needs a box that is contiguous in its tensor")
        flat = box.reshape(-1)
        undo = delta.apply(flat, payload)
        self._opened.undo.append(lambda: undo.restore(flat))

    def overwrites(self, piece: Piece) -> None:
        """A piece is about to be overwritten: keep what was there where that is little, else there is no base of it any more."""
        if self._opened.offer.base_version is not None and piece.nbytes <= KEPT_BYTES:
            box = self.box(piece)
            kept = box.copy()
            self._opened.undo.append(lambda: np.copyto(box, kept))
            return
        self._lose(piece)

    def _lose(self, piece: Piece) -> None:
        if piece.model == TARGET:
            self.base_version = None
        self._digests.pop((piece.model, piece.tensor), None)

    def check(self, piece: Piece) -> None:
        """Check a piece that lies in the memory: its place, its digest, its numbers. Raises `PlanError`."""
        began = time.perf_counter()
        opened, box = self._opened, self.box(piece)
        opened.coverage.add(piece)
        dtype = opened.layout.dtype(piece.model, piece.tensor)
        found, finite = digest_and_check(np.ascontiguousarray(box), dtype)
        opened.check_s += time.perf_counter() - began
        if found != piece.digest:
            raise PlanError(f"{self._name(piece)}: digest {found.hex()} arrived, {piece.digest.hex()} was sent")
        if not finite:
            raise PlanError(f"{self._name(piece)} holds NaN or infinity: the trainer's step has diverged, or a scale is missing")
        if opened.offer.carrier == "shm":
            # It was written without our knowing.
            self._lose(piece)
        opened.boxes.setdefault((piece.model, piece.tensor), {})[piece.start, piece.shape] = piece.digest
        opened.arrived += 1
        opened.received_bytes += piece.nbytes

    def verify(self) -> dict[str, Any]:
        """Whether all that is needed is there: the manifest for the engine. Raises `PlanError` with names.

        Keys: ``path``, ``bytes``, ``version``, ``target`` and ``draft`` (per tensor name, dtype, shape, offset, digest; empty for
        a model that did not come), ``report``.
        """
        opened = self._opened
        models = opened.coverage.models()
        if not any(models):
            raise PlanError("the update holds no tensors: name some for the target or the draft")
        for model in (TARGET, DRAFT):
            if models[model]:
                self._check_complete(model, opened)
        manifest: dict[str, Any] = {
            "path": str(self.staging.path),
            "bytes": self.staging.nbytes,
            "version": opened.offer.version,
            "report": {
                "pieces": opened.arrived,
                "received_bytes": opened.received_bytes,
                "check_ms": round(1e3 * opened.check_s, 1),
                "target_tensors": opened.coverage.complete(TARGET),
                "target_expected": len(self.plan.target),
                "draft_tensors": opened.coverage.complete(DRAFT),
                "draft_expected": len(self.plan.draft),
            },
        }
        for model in (TARGET, DRAFT):
            manifest[MODELS[model]] = self._entries(model, opened) if models[model] else []
        return manifest

    def _check_complete(self, model: int, opened: _Open) -> None:
        coverage, which = opened.coverage, MODELS[model]
        if begun := coverage.begun(model):
            raise PlanError(f"of {len(begun)} tensors of the {which} a part is missing, among them {_some(begun)}")
        missing = coverage.missing(model)
        if not missing:
            return
        expected = len(self.plan.specs(model))
        if not opened.offer.partial or model == DRAFT:
            raise PlanError(
                f"{expected - len(missing)} of {expected} tensors of the {which} came; missing: {_some(missing)}"
                + ("" if model == DRAFT else " (partial=True leaves those as they are)")
            )
        left = set(missing)
        unknown = [
            spec.name for t, spec in enumerate(self.plan.specs(model)) if spec.name in left and (model, t) not in self._digests
        ]
        if unknown:
            raise PlanError(f"a partial update without {_some(unknown)}: the engine holds no copy of them; send all tensors once")

    def _entries(self, model: int, opened: _Open) -> list[dict[str, Any]]:
        entries = []
        for t, spec in enumerate(self.plan.specs(model)):
            if boxes := opened.boxes.get((model, t)):
                opened.digests[model, t] = self._digest_of(model, t, opened.layout, boxes)
            found = opened.digests.get((model, t)) or self._digests[model, t]
            entries.append(
                {
                    "name": spec.name,
                    "dtype": opened.layout.dtype(model, t),
                    "shape": list(spec.shape),
                    "offset": opened.layout.offsets[model][t],
                    "digest": found.hex(),
                }
            )
        return entries

    def _digest_of(self, model: int, tensor: int, layout: Layout, boxes: dict[tuple[Extents, Extents], bytes]) -> bytes:
        begin = layout.offsets[model][tensor]
        data = self.staging.memory[begin : begin + layout.tensor_bytes(model, tensor)]
        return tensor_digest(data, self.plan.specs(model)[tensor].shape, ITEM_BYTES[layout.dtype(model, tensor)], boxes)

    def committed(self) -> None:
        """The engine serves the open update: its bytes are the base of the next."""
        opened = self._opened
        self._digests.update(opened.digests)
        whole = all((TARGET, t) in self._digests for t in range(len(self.plan.target)))
        self.base_version = opened.offer.version if whole else None
        self.base_dtypes = opened.offer.dtypes
        self._open = None

    def aborted(self) -> None:
        """Forget the open update. What deltas changed is put back; a trainer that still writes writes into the void."""
        opened, self._open = self._open, None
        if opened is None:
            return
        for undo in reversed(opened.undo):
            undo()
        if opened.offer.carrier == "shm":
            self._forget()
            self.staging.close()

    def _forget(self) -> None:
        self.base_version = None
        self._digests.clear()

    def _name(self, piece: Piece) -> str:
        specs = self.plan.specs(piece.model)
        name = specs[piece.tensor].name if piece.tensor < len(specs) else f"tensor {piece.tensor}"
        return f"{name} of the {MODELS[piece.model]}"


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
