"""Weight sync through vLLM's own four-phase interface, for trainers that drive it with vLLM's clients (HTTP, Ray).

The trainer writes its tensors into shared memory once, with digests; ``update_weights`` checks them and builds aside, while nothing
served is touched; ``finish_weight_update`` puts all of it in between two steps, or nothing. The bridge's own control plane does the
same with smaller pauses, over any carrier, and with versions: see `trainer_bridge`.

Importing this module registers the trainer's side with vLLM's factory; the plugin registers the engine's side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from trainer_bridge import wire
from trainer_bridge.carriers.sending import TORCH_DTYPES, Item, ShmSender
from trainer_bridge.digest import digest_and_check, tensor_digest
from trainer_bridge.errors import PlanError
from trainer_bridge.plan import AS_PLANNED, ITEM_BYTES, Layout, Plan, blocks, place
from trainer_bridge.staging import Mapping, Staging
from vllm_specdraft import worker

BACKEND = "specdraft"


@dataclass
class SpecdraftInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on: each update says where it lies."""


@dataclass
class SpecdraftUpdateInfo(WeightTransferUpdateInfo):
    """Where the tensors of one update lie, as JSON knows it."""

    path: str
    """Shared-memory file of the trainer, on the engine's host."""
    bytes: int
    version: int
    """Policy version that they are."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """Per tensor ``name``, ``dtype``, ``shape``, ``offset`` in bytes, ``digest`` (hex, see `tensor_digest`)."""


class SpecdraftWeightTransferEngine(WeightTransferEngine[SpecdraftInitInfo, SpecdraftUpdateInfo]):
    """The worker's side. The plugin's agent in this process does the work."""

    init_info_cls = SpecdraftInitInfo
    update_info_cls = SpecdraftUpdateInfo

    def init_transfer_engine(self, init_info: SpecdraftInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Forget what an update before left unfinished. The engine generates on."""
        self._staging = Mapping()
        worker.agent_of_process().sync({"op": "discard"})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check and build what lies in shared memory; see `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SpecdraftUpdateInfo) -> None:
        """Check digests, numbers and names, and build aside. Raises; then the version before serves on."""
        agent = worker.agent_of_process()
        memory = self._staging.of(update_info.path, update_info.bytes)
        for entry in update_info.tensors:
            _check(memory, entry)
        for_draft = self.model is not self._default_model
        manifest = {
            "path": update_info.path,
            "bytes": update_info.bytes,
            "version": update_info.version,
            "target": [] if for_draft else update_info.tensors,
            "draft": update_info.tensors if for_draft else [],
            "update": f"to version {update_info.version}",
            "job": "vLLM's client",
        }
        agent.sync({"op": "open", "manifest": manifest})
        while not agent.sync({"op": "build"})["built"]:
            pass

    def finish_weight_update(self) -> None:
        """Serve it from the next step on, on all ranks, or raise and serve the version before."""
        worker.agent_of_process().commit({})

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _check(memory: Any, entry: dict[str, Any]) -> None:
    spec = wire.Spec(name=entry["name"], dtype=entry["dtype"], shape=tuple(entry["shape"]))
    layout = Layout.of(Plan(target=(spec,)), (AS_PLANNED, AS_PLANNED))
    begin, count = entry["offset"], layout.tensor_bytes(0, 0)
    if begin < 0 or begin + count > memory.size:
        raise PlanError(f"{spec.name} would lie at bytes {begin} to {begin + count} of {memory.size}")
    data, known, all_finite = memory[begin : begin + count], {}, True
    for start, shape in blocks(spec.shape, itemsize=ITEM_BYTES[spec.dtype]):
        words = layout.box(data, wire.Piece(0, 0, start, shape, 0, bytes(16)))
        known[start, shape], finite = digest_and_check(words, spec.dtype)
        all_finite = all_finite and finite
    found = tensor_digest(data, spec.shape, ITEM_BYTES[spec.dtype], known).hex()
    if found != entry["digest"]:
        raise PlanError(f"{spec.name}: digest {found} arrived, {entry['digest']} was sent")
    if not all_finite:
        raise PlanError(f"{spec.name} holds NaN or infinity: the trainer's step has diverged, or a scale is missing")


@dataclass
class SpecdraftTrainerInitInfo(TrainerInitInfo):
    """The trainer's side of the handshake: rank 0 sends."""

    backend: ClassVar[str] = BACKEND
    version: int = 0
    """Policy version that the engine serves now; each `send_weights` makes it one more."""
    for_draft: bool = False
    """Whether the source is the draft, whose update leaves the policy version as it is."""


class SpecdraftTrainerEngine(TrainerWeightTransferEngine[SpecdraftTrainerInitInfo]):
    """Writes all tensors of a `WeightSource` into shared memory of this process, and tells the engine where."""

    init_info_cls = SpecdraftTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, init: SpecdraftTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=init.is_sender)
        self.version, self._for_draft = init.version, init.for_draft
        self._staging = Staging("trainer") if init.is_sender else None

    @classmethod
    def trainer_init(
        cls, init_info: SpecdraftTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Ready to send. Raises `ValueError` without a source."""
        if source is None:
            raise ValueError("the specdraft backend sends whole models: give a WeightSource")
        made = cls(client=client, source=source, init=init_info)
        if made.is_sender:
            client.init_weight_transfer_engine({})
        return made

    def send_weights(self) -> None:
        """Bring the engine to the next version. Raises whatever the engine refused; it serves on."""
        assert self.source is not None
        if self._staging is None:
            # Gathering a tensor may be a collective.
            for _ in self.source:
                pass
            return
        client = self.client
        client.start_draft_weight_update() if self._for_draft else client.start_weight_update()  # type: ignore[attr-defined]
        version = self.version + (not self._for_draft)
        client.update_weights({"version": version, **self._written(self._staging)})
        client.finish_weight_update()
        self.version = version

    def _written(self, staging: Staging) -> dict[str, Any]:
        """Write everything; what the engine has to know of it."""
        assert self.source is not None
        metadata = self.source.metadata()
        specs = tuple(wire.Spec(name=m.name, dtype=str(m.dtype).removeprefix("torch."), shape=tuple(m.shape)) for m in metadata)
        layout = Layout.of(Plan(target=specs), (AS_PLANNED, AS_PLANNED))
        staging.ensure(layout.nbytes)
        sender = ShmSender(staging.memory, layout, "update", lambda message: None)
        tensors = []
        for index, (spec, (name, tensor)) in enumerate(zip(specs, self.source, strict=True)):
            if name != spec.name or tuple(tensor.shape) != spec.shape:
                raise PlanError(
                    f"the source gives {name} {list(tensor.shape)} where its metadata has {spec.name} {list(spec.shape)}"
                )
            known = {}
            for start, shape in blocks(spec.shape, itemsize=ITEM_BYTES[spec.dtype]):
                part = tensor[place(start, shape)]
                block = Item(model=0, tensor=index, start=start, source=part, dtype=TORCH_DTYPES[spec.dtype])
                sender.send([block])
                known[start, shape] = block.piece().digest
            begin, count = layout.offsets[0][index], layout.tensor_bytes(0, index)
            found = tensor_digest(staging.memory[begin : begin + count], spec.shape, ITEM_BYTES[spec.dtype], known)
            entry = {"name": name, "dtype": spec.dtype, "shape": list(spec.shape), "offset": begin, "digest": found.hex()}
            tensors.append(entry)
        return {"path": str(staging.path), "bytes": staging.nbytes, "tensors": tensors}

    def shutdown(self) -> None:
        """Remove the shared memory."""
        if self._staging is not None:
            self._staging.close()


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, SpecdraftTrainerEngine)
