"""The engine's side of the carriers that have a data plane of their own. Imports no torch unless a collective needs it."""

from __future__ import annotations

from trainer_bridge.carriers.base import DataPlane, Sink
from trainer_bridge.carriers.tcp_receiver import TcpReceiver


def open_data_plane(carrier: str, *, host: str, token: bytes, receiver: Sink) -> DataPlane | None:
    """The data plane of a carrier; None for those whose bytes come through shared memory or the control socket."""
    if carrier == "tcp":
        return TcpReceiver(host, token, receiver)
    if carrier in ("gloo", "nccl"):
        from trainer_bridge.carriers.collective import CollectiveReceiver

        return CollectiveReceiver(carrier, receiver)
    return None
