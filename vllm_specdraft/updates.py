"""What one tensor-parallel rank does with an update that was verified: build it aside, put it in between two steps, or put it back.

The same on every rank. A rank that fails tells the others before anybody goes on, so all of them serve the new version or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from trainer_bridge.carriers.sending import TORCH_DTYPES, bytes_of
from trainer_bridge.digest import digest, tensor_digest
from trainer_bridge.errors import BridgeError
from trainer_bridge.staging import Mapping as StagingMapping
from vllm_specdraft import preflight
from vllm_specdraft.heap import Heap
from vllm_specdraft.policy_swap import Build, PolicySwap, PolicySwapError, Replaced
from vllm_specdraft.ranks import Ranks
from vllm_specdraft.swap import DraftSwap

SPARE_BYTES = 256 << 20
"""Memory that must be left while an update is built."""
NO_PREVIOUS = "no previous version is kept: start the server with --keep-previous, and after an update there is one"


class StaleStagingError(BridgeError, RuntimeError):
    """The staged bytes are not the ones that were verified: somebody wrote them since."""


@dataclass(kw_only=True)
class Previous:
    """What a rollback brings back."""

    version: int
    replaced: Replaced
    draft: dict[str, torch.Tensor] | None
    """The draft that was served then; None on ranks that do not keep drafts."""
    digest: str
    """Of the target."""


class PolicyUpdates:
    """The updates of one rank's target and draft."""

    def __init__(self, runner: Any, ranks: Ranks, drafts: DraftSwap, heap: Heap, *, keep_previous: bool) -> None:
        self._ranks, self._drafts, self._heap, self._keep = ranks, drafts, heap, keep_previous
        self._item_bytes = runner.model_config.dtype.itemsize
        self._policy = PolicySwap(runner)
        self._staging = StagingMapping()
        self._build: Build | None = None
        self._manifest: dict[str, Any] | None = None
        self.target_digest = ""
        """Of the weights that the open update brings."""
        self.previous: Previous | None = None
        # Weights that serve no more, until others are built in their memory: pages that the system had meanwhile come back when
        # they are written to, and packing one large layer then takes ten times as long.
        self._spare: Replaced | None = None
        self._room: torch.Tensor | None = None
        """As large as the largest layer: what its packing needs on top."""

    def open(self, manifest: dict[str, Any]) -> None:
        """Start to build a verified update. One that was under way is dropped."""
        self.discard()
        memory = self._staging.of(manifest["path"], manifest["bytes"])

        def start() -> None:
            need = self._item_bytes * sum(prod(entry["shape"]) for entry in manifest["target"]) // self._ranks.size
            # The allocator may keep what the spare weights leave, but has it for these; they are as large.
            kept = max(self._heap.free_bytes(), need if self._spare is not None else 0)
            self._spare = self._room = None
            if (free := preflight.available_bytes() + kept) < need + SPARE_BYTES:
                raise MemoryError(
                    f"the new weights are built beside the old ones: {need / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free; "
                    "make the KV cache (--kv-gib) or the replay (--replay-mb) smaller"
                )
            self._build = self._policy.build([(entry["name"], _reader(memory, entry)) for entry in manifest["target"]])

        if manifest["target"]:
            self._together(start)
        self._manifest = manifest
        self.target_digest = digest("".join(entry["digest"] for entry in manifest["target"]).encode()).hex()

    @property
    def building(self) -> bool:
        """Whether an update is being built, or waits to be put in."""
        return self._build is not None

    def manifest(self) -> dict[str, Any]:
        """Of the open update. Raises `BridgeError` when none is open."""
        if self._manifest is None:
            raise BridgeError("no update is open: it was dropped, or never staged")
        return self._manifest

    def build(self, budget_s: float) -> tuple[int, int, bool]:
        """Build for about `budget_s` seconds: tensors built, all tensors, whether every rank has all. Raises as `open` does."""
        # Somebody else may have dropped it meanwhile.
        self.manifest()
        build = self._build
        if build is None:
            return 0, 0, True
        finished = self._together(lambda: build.step(budget_s))
        return build.done, build.total, self._ranks.all_agree(finished)

    def discard(self) -> None:
        """Drop what was built and not put in."""
        self._build = self._manifest = None
        self._heap.wanted = True

    def draft(self) -> dict[str, torch.Tensor] | None:
        """A copy of the draft that came with the open update, checkpoint names; None when none came. Raises on changed bytes."""
        manifest = self._manifest
        if manifest is None or not manifest["draft"]:
            return None
        memory = self._staging.of(manifest["path"], manifest["bytes"])
        return {entry["name"]: _reader(memory, entry)().clone() for entry in manifest["draft"]}

    def commit(self, draft: Mapping[str, torch.Tensor] | None, *, version: int, served: dict | None, target_digest: str) -> bool:
        """Put in what was built, and the draft; whether the target changed. On any error, on any rank, all is as it was.

        Args:
            draft: what `draft` gave.
            version, served, target_digest: version, draft and digest that serve now, for a rollback.
        """
        build = self._build
        replaced = self._together(lambda: self._policy.apply(build)) if build is not None else None
        if replaced is not None:
            # What the last layer's packing has just left.
            self._room = torch.empty(self._policy.largest * self._item_bytes // self._ranks.size, dtype=torch.uint8)
        self._swap_draft(draft, replaced)
        self.discard()
        if replaced is not None:
            self._spare, before = replaced, self.previous
            self.previous = None
            if self._keep:
                self.previous = Previous(version=version, replaced=replaced, draft=served, digest=target_digest)
                self._spare = before.replaced if before is not None else None
        return replaced is not None

    def roll_back(self, draft: Mapping[str, torch.Tensor] | None) -> None:
        """Put the previous version back, with `draft` where another one serves by now. On any error all is as it was."""
        previous = self.previous
        if previous is None:
            raise BridgeError(NO_PREVIOUS)
        replaced = self._together(lambda: self._policy.restore(previous.replaced))
        self._swap_draft(draft, replaced)
        self.discard()
        self.previous, self._spare = None, replaced

    def _swap_draft(self, draft: Mapping[str, torch.Tensor] | None, replaced: Replaced | None) -> None:
        if draft is None:
            return
        try:
            self._drafts.apply(draft, self._ranks.all_agree)
        except BaseException:
            if replaced is not None:
                self._policy.restore(replaced)
            raise

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do something on every rank; an error on one is an error on all, and what was done is undone where it was."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again once every rank knows
            failure = error
        if self._ranks.all_agree(failure is None):
            return result
        if isinstance(result, Replaced):
            self._policy.restore(result)
        self.discard()
        raise failure or PolicySwapError("another rank could not do it; all serve what they served")


def _reader(memory: Any, entry: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Reads one staged tensor, and makes sure that it is still what was verified."""

    def read() -> torch.Tensor:
        dtype = TORCH_DTYPES[entry["dtype"]]
        count = dtype.itemsize * prod(entry["shape"])
        part = torch.from_numpy(memory[entry["offset"] : entry["offset"] + count])
        tensor = part.view(dtype).reshape(entry["shape"])
        if tensor_digest(bytes_of(tensor), tuple(entry["shape"]), dtype.itemsize).hex() != entry["digest"]:
            raise StaleStagingError(f"{entry['name']} was written again after it was verified: the update is refused")
        return tensor

    return read
