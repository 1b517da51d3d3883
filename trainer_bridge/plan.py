"""What an engine takes, and where each tensor lies in the staging memory. Planned once per engine; imports no torch.

A tensor travels in boxes (`start`, `shape`, both per dimension): a whole tensor, a part of one that is larger than a bucket, or the
shard of one rank. A tensor is complete when its boxes cover every element exactly once.

>>> list(split((5, 4), itemsize=4, bucket_bytes=32))     # two rows of 16 bytes fit into a bucket
[((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (1, 4))]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer_bridge.errors import ConfigError, PlanError
from trainer_bridge.wire import MODELS, Piece, Spec

if TYPE_CHECKING:
    import numpy as np

Extents: TypeAlias = tuple[int, ...]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATING = frozenset(name for name in ITEM_BYTES if "float" in name)
AS_PLANNED = "plan"
"""Wire dtype that means: as the engine's launch checkpoint has it."""
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
BLOCK_BYTES = 32 << 20
"""Size of the blocks in which a tensor travels and is checked, unless the trainer chose other buckets."""
_ALIGNMENT = 64
_LARGEST_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> dict[str, Spec]:
    """Tensors of a safetensors file by name, from its header. Raises `ConfigError` when the file is not whole.

    The format: 8 bytes with the header's length, the header as JSON (name, dtype, shape and place of each tensor), the data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise _damaged(path, f"its header should have {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            found = {
                name: Spec(name=name, dtype=_SAFETENSORS.get(entry["dtype"], entry["dtype"]), shape=tuple(entry["shape"]))
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise _damaged(path, "its header is not readable") from None
    if 8 + length + end != size:
        raise _damaged(path, f"it should have {8 + length + end} bytes, it has {size}")
    return found


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged or half-written ({why}): copy it again from where the model came from")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Names, dtypes and shapes of all tensors that an engine takes, in the order in which they are staged."""

    target: tuple[Spec, ...]
    draft: tuple[Spec, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the target that are taken and not needed, and why."""

    def __post_init__(self) -> None:
        for model in (0, 1):
            for spec in self.specs(model):
                if spec.dtype not in ITEM_BYTES:
                    raise PlanError(f"{spec.name} of the {MODELS[model]} is {spec.dtype}, which cannot be sent")

    def specs(self, model: int) -> tuple[Spec, ...]:
        """Tensors of target (0) or draft (1)."""
        return self.draft if model else self.target


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where every tensor of a plan lies, in the wire dtypes of one update."""

    plan: Plan
    dtypes: tuple[str, str]
    """Wire dtype of floating-point tensors of target and draft, or `AS_PLANNED`."""
    offsets: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int

    @classmethod
    def of(cls, plan: Plan, dtypes: Sequence[str]) -> Layout:
        """Lay a plan out. Raises `PlanError` for a wire dtype that is none."""
        for dtype in dtypes:
            if dtype != AS_PLANNED and dtype not in FLOATING:
                raise PlanError(f"wire dtype {dtype!r} is none of {AS_PLANNED}, {', '.join(sorted(FLOATING))}")
        at, offsets = 0, ([], [])  # type: ignore[var-annotated]
        for model in (0, 1):
            for spec in plan.specs(model):
                offsets[model].append(at)
                nbytes = prod(spec.shape) * ITEM_BYTES[wire_dtype(spec, dtypes[model])]
                at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(plan=plan, dtypes=(dtypes[0], dtypes[1]), offsets=(tuple(offsets[0]), tuple(offsets[1])), nbytes=at)

    def dtype(self, model: int, tensor: int) -> str:
        """Wire dtype of one tensor."""
        return wire_dtype(self.plan.specs(model)[tensor], self.dtypes[model])

    def tensor_bytes(self, model: int, tensor: int) -> int:
        """Bytes of one whole tensor on the wire."""
        return prod(self.plan.specs(model)[tensor].shape) * ITEM_BYTES[self.dtype(model, tensor)]

    def box(self, memory: np.ndarray, piece: Piece) -> np.ndarray:
        """The elements of a piece inside the staging memory ``[nbytes]`` uint8: unsigned integers of the element's width.

        A view with the piece's shape. Raises `PlanError` when the piece is not inside its tensor.
        """
        specs = self.plan.specs(piece.model)
        if piece.tensor >= len(specs):
            raise PlanError(f"tensor {piece.tensor} of the {MODELS[piece.model]}: the engine takes {len(specs)}")
        spec = specs[piece.tensor]
        if len(piece.start) != len(spec.shape) or len(piece.shape) != len(spec.shape):
            raise PlanError(f"{spec.name}: a box of {len(piece.shape)} dimensions, the tensor has shape {list(spec.shape)}")
        if any(s + n > whole for s, n, whole in zip(piece.start, piece.shape, spec.shape, strict=True)):
            raise PlanError(f"{spec.name}: a box {list(piece.shape)} at {list(piece.start)}, the shape is {list(spec.shape)}")
        width = ITEM_BYTES[self.dtype(piece.model, piece.tensor)]
        begin = self.offsets[piece.model][piece.tensor]
        whole = memory[begin : begin + self.tensor_bytes(piece.model, piece.tensor)].view(f"u{width}").reshape(spec.shape)
        return whole[place(piece.start, piece.shape)]

    def box_bytes(self, piece: Piece) -> int:
        """Bytes of a piece's box on the wire."""
        return prod(piece.shape) * ITEM_BYTES[self.dtype(piece.model, piece.tensor)]


def wire_dtype(spec: Spec, chosen: str) -> str:
    """The dtype in which a tensor travels: what was chosen goes for floating-point tensors only."""
    return spec.dtype if chosen == AS_PLANNED or spec.dtype not in FLOATING else chosen


def place(start: Extents, shape: Extents) -> tuple[Any, ...]:
    """Index of a box in its tensor; it gives a view also where there are no dimensions."""
    return (*(slice(s, s + n) for s, n in zip(start, shape, strict=True)), ...)


def blocks(shape: Extents, *, itemsize: int) -> Iterator[tuple[Extents, Extents]]:
    """The boxes of a tensor whose digests make its own: `BLOCK_BYTES` at most."""
    return split(shape, itemsize=itemsize, bucket_bytes=BLOCK_BYTES)


def split(shape: Extents, *, itemsize: int, bucket_bytes: int) -> Iterator[tuple[Extents, Extents]]:
    """Boxes (start, shape) of at most `bucket_bytes` that cover a tensor, each contiguous in it, in order."""
    dims = len(shape)
    if prod(shape) * itemsize <= bucket_bytes or all(n <= 1 for n in shape):
        yield (0,) * dims, shape
        return
    axis = next(i for i, n in enumerate(shape) if n > 1)
    row_bytes = prod(shape[axis + 1 :]) * itemsize
    rows = max(1, bucket_bytes // max(1, row_bytes))
    for begin in range(0, shape[axis], rows):
        count = min(rows, shape[axis] - begin)
        for start, part in split((*shape[:axis], count, *shape[axis + 1 :]), itemsize=itemsize, bucket_bytes=bucket_bytes):
            yield (*start[:axis], start[axis] + begin, *start[axis + 1 :]), part


class Coverage:
    """Which elements of which tensors have arrived. Overlaps are refused: two ranks that send the same rows disagree."""

    MAX_BOXES = 4096
    """Boxes per tensor; more are no sensible way to cut one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._boxes: dict[tuple[int, int], list[tuple[Extents, Extents]]] = {}
        self._elements: dict[tuple[int, int], int] = {}

    def add(self, piece: Piece) -> None:
        """Count a piece that lies inside its tensor. Raises `PlanError` when part of it was there before."""
        key = (piece.model, piece.tensor)
        boxes = self._boxes.setdefault(key, [])
        name = self._plan.specs(piece.model)[piece.tensor].name
        if len(boxes) >= self.MAX_BOXES:
            raise PlanError(f"{name} comes in more than {self.MAX_BOXES} pieces: larger buckets need fewer")
        for start, shape in boxes:
            # A tensor without dimensions, or without elements, has one box: itself.
            if all(a < b + m and b < a + n for a, n, b, m in zip(piece.start, piece.shape, start, shape, strict=True)):
                raise PlanError(f"{name}: rows at {list(piece.start)} came twice: each rank must send a share of its own")
        boxes.append((piece.start, piece.shape))
        self._elements[key] = self._elements.get(key, 0) + prod(piece.shape)

    def models(self) -> tuple[bool, bool]:
        """Whether anything of target and draft came."""
        return any(m == 0 for m, _ in self._boxes), any(m == 1 for m, _ in self._boxes)

    def complete(self, model: int) -> int:
        """How many tensors of a model are there whole."""
        return sum(self._is_whole(model, t) for t in range(len(self._plan.specs(model))))

    def missing(self, model: int) -> list[str]:
        """Names of the model's tensors of which elements are missing."""
        return [spec.name for t, spec in enumerate(self._plan.specs(model)) if not self._is_whole(model, t)]

    def begun(self, model: int) -> list[str]:
        """Names of the model's tensors of which a part came, and a part did not."""
        return [
            spec.name
            for t, spec in enumerate(self._plan.specs(model))
            if (model, t) in self._boxes and not self._is_whole(model, t)
        ]

    def _is_whole(self, model: int, tensor: int) -> bool:
        key = (model, tensor)
        return key in self._boxes and self._elements[key] == prod(self._plan.specs(model)[tensor].shape)
