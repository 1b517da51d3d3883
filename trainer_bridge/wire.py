"""Messages of the control plane: typed, versioned msgpack, decoded within limits. Never pickle.

A message is one frame; `Data` and `Sample` are followed by one frame of payload. What cannot be decoded raises `WireError`
and nothing else, whatever the bytes are, and never takes more memory than a small multiple of the frame. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from trainer_bridge.errors import WireError

PROTOCOL = 1
"""Grows with every change that an older side would misread; both sides must have the same."""
MAX_CONTROL_BYTES = 16 << 20
"""Largest control frame, in bytes; what is larger is refused before it is decoded."""
MAX_DEPTH = 8
TARGET, DRAFT = 0, 1
"""Which model a tensor belongs to."""
MODELS = ("target", "draft")

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
UpdateId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Extents: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
Running: TypeAlias = Literal["recompute", "keep", "drain", "abort"]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages. Each names its tag; the order of fields does not matter on the wire."""


class Spec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor the engine takes: checkpoint name, dtype of the launch checkpoint, whole shape."""

    name: Name
    dtype: Name
    shape: Extents


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One box of one tensor, on its way."""

    model: Literal[0, 1]
    tensor: Count
    """Index in the engine's plan of that model."""
    start: Extents
    shape: Extents
    nbytes: Count
    """Bytes of the payload: of the box in the wire dtype, or of the delta."""
    digest: Digest
    """xxh3-128 of the box's bytes as they should be afterwards."""
    delta: bool = False
    """Whether the payload is a delta against the base version."""


# -- trainer -> engine ---------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a client; answered by `Welcome` or `Refused`."""

    protocol: int
    job: Name
    client: Name
    """Names one process of the trainer, for as long as it lives."""
    rank: Count
    world: Count


class Ping(_Message, frozen=True, tag="ping"):
    """Heartbeat of a client; answered by `Pong`."""

    client: Name


class Offer(_Message, frozen=True, tag="offer"):
    """Open an update; answered by `Accepted`, `Refused`, or the `Outcome` of an update with this id that is already over."""

    update: UpdateId
    version: Count
    base_version: Count | None
    """Version that deltas stand against; None: no deltas will come."""
    world: Count
    """Ranks that will send a share."""
    carrier: Name
    dtypes: tuple[Name, Name]
    """Wire dtype of floating-point tensors of target and draft; ``plan``: as the engine's launch checkpoint has them."""
    partial: bool
    """Whether tensors may be missing: these keep the values of the version served."""
    running: Running
    drain_timeout_s: Seconds
    deadline_s: Seconds
    """The update is aborted when it is not committed after so many seconds."""


class Attach(_Message, frozen=True, tag="attach"):
    """Join an update that another rank offers, or will offer within `deadline_s`; answered like `Offer`."""

    version: Count
    rank: Count
    carrier: Name
    deadline_s: Seconds


class Join(_Message, frozen=True, tag="join"):
    """Take part in the broadcast of an update, by a process group that the trainer makes."""

    update: UpdateId
    address: Name
    """Of the trainer's store, as ``host:port``."""
    rank: Count
    """The engine's; the trainer is rank 0."""
    world: Count
    timeout_s: Seconds


class Staged(_Message, frozen=True, tag="staged"):
    """Pieces that lie in the shared staging memory now."""

    update: UpdateId
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=1 << 16)]


class Data(_Message, frozen=True, tag="data"):
    """Pieces whose payloads follow one after the other in the next frame."""

    update: UpdateId
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=1 << 16)]


class Finish(_Message, frozen=True, tag="finish"):
    """A rank has sent all it has; answered by an `Outcome` once all ranks have."""

    update: UpdateId
    rank: Count
    pieces: Count
    """How many it sent."""


class Commit(_Message, frozen=True, tag="commit"):
    """Serve a verified update; answered by an `Outcome`."""

    update: UpdateId


class Abort(_Message, frozen=True, tag="abort"):
    """Give an update up; answered by an `Outcome`."""

    update: UpdateId
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Query(_Message, frozen=True, tag="query"):
    """Ask what became of an update; answered by an `Outcome`."""

    update: UpdateId


class Sample(_Message, frozen=True, tag="sample"):
    """One hidden-state sample (`trainer_bridge.taps`); its tensors follow one after the other in the next frame."""

    sequence: Count
    request_id: Name
    group_id: Name
    policy_version: Count
    tap_layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]
    final_is_normed: bool
    tensors: Annotated[tuple[Spec, ...], msgspec.Meta(max_length=8)]
    digest: Digest


# -- engine -> trainer ---------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """Who the engine is and what it takes."""

    protocol: int
    server: Name
    """Names one server process, for as long as it lives."""
    host: Name
    """Equal for two processes that can share memory."""
    policy_version: Count
    draft_version: Count
    base_version: Count | None
    """Version whose bytes the engine holds: what a delta may stand against."""
    base_dtypes: tuple[Name, Name]
    target: tuple[Spec, ...]
    draft: tuple[Spec, ...]
    ignored: dict[str, str]
    """Tensors of the target that are taken and not needed, and why (the head of a tied model)."""
    carriers: tuple[Name, ...]
    max_data_bytes: Count
    """Largest payload of one `Data` frame."""
    sample_window_bytes: Count


class Accepted(_Message, frozen=True, tag="accepted"):
    """The update is open: where to put it."""

    update: UpdateId
    dtypes: tuple[Name, Name]
    """Wire dtypes of the update, as the offer had them."""
    staging: str
    """Path of the shared-memory file."""
    staging_bytes: Count
    offsets: tuple[tuple[Count, ...], tuple[Count, ...]]
    """Where each tensor of target and draft begins in it."""
    address: str
    """Of the carrier's data plane, as ``host:port``; empty where it has none."""
    token: bytes
    """Opens a data connection."""


class Refused(_Message, frozen=True, tag="refused"):
    """Nothing was changed; the reason is for the user."""

    update: str
    code: Literal["protocol", "busy", "base", "plan", "version", "carrier", "memory", "closed"]
    reason: str


class Outcome(_Message, frozen=True, tag="outcome"):
    """State of an update, and what came of it."""

    update: UpdateId
    state: Literal["OFFERED", "STAGING", "VERIFIED", "COMMITTED", "ABORTED", "UNKNOWN"]
    reason: str
    policy_version: Count
    draft_version: Count
    report: dict[str, Any]
    """Counts, bytes and times, for people."""


class Pong(_Message, frozen=True, tag="pong"):
    """The engine lives."""

    server: Name
    policy_version: Count
    draft_version: Count


class SampleTaken(_Message, frozen=True, tag="sample_taken"):
    """A sample reached the replay, or did not and why."""

    sequence: Count
    taken: bool
    reason: str


FromTrainer: TypeAlias = Hello | Ping | Offer | Attach | Join | Staged | Data | Finish | Commit | Abort | Query | Sample
FromEngine: TypeAlias = Welcome | Accepted | Refused | Outcome | Pong | SampleTaken

_ENCODER = msgspec.msgpack.Encoder()
_FROM_TRAINER = msgspec.msgpack.Decoder(FromTrainer)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)


def encode(message: FromTrainer | FromEngine) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def decode_from_trainer(frame: bytes | memoryview, limit: int = MAX_CONTROL_BYTES) -> FromTrainer:
    """The message in a frame that a trainer sent. Raises `WireError`."""
    return _decode(_FROM_TRAINER, frame, limit)


def decode_from_engine(frame: bytes | memoryview, limit: int = MAX_CONTROL_BYTES) -> FromEngine:
    """The message in a frame that an engine sent. Raises `WireError`."""
    return _decode(_FROM_ENGINE, frame, limit)


def _decode(decoder: Any, frame: bytes | memoryview, limit: int) -> Any:
    if len(frame) > limit:
        raise WireError(f"a control frame of {len(frame)} bytes, the limit is {limit}")
    try:
        _scan(memoryview(frame))
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"no message of protocol {PROTOCOL}: {error}") from None


_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Bytes that follow a tag of fixed length."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length that follows a tag of bytes or text."""
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count that follows a tag of an array or map, and items per count."""


def _scan(frame: memoryview) -> None:
    """Refuse a frame whose counts promise more items than it has bytes, or that nests too deep, before anything is allocated.

    Every item takes at least one byte, so a count beyond the bytes that are left is a lie. Extension types are not ours.
    """
    at, size = 0, len(frame)
    left = [1]
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        if at >= size:
            raise WireError("the frame ends in the middle of a message")
        tag = frame[at]
        at += 1
        items = 0
        if tag <= 0x7F or tag >= 0xE0:
            pass
        elif tag <= 0x8F:
            items = 2 * (tag & 0x0F)
        elif tag <= 0x9F:
            items = tag & 0x0F
        elif tag <= 0xBF:
            at += tag & 0x1F
        elif tag in _FIXED:
            at += _FIXED[tag]
        elif tag in _SIZED:
            width = _SIZED[tag]
            at += width + int.from_bytes(frame[at : at + width], "big")
        elif tag in _NESTED:
            width, factor = _NESTED[tag]
            items = factor * int.from_bytes(frame[at : at + width], "big")
            at += width
        else:
            raise WireError(f"the frame holds tag {tag:#x}, which no message has")
        if at > size or items > size - at:
            raise WireError("the frame promises more than it holds")
        if items:
            if len(left) >= MAX_DEPTH:
                raise WireError(f"the frame nests deeper than {MAX_DEPTH}")
            left.append(items)
    if at != size:
        raise WireError(f"{size - at} bytes too many behind a message")
