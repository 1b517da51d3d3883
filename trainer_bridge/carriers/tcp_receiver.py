"""The engine's side of the ``tcp`` carrier. Imports no torch."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np

from trainer_bridge import wire
from trainer_bridge.carriers.base import HEADER, HELD_PAYLOADS, MAGIC, MAX_HEADER_BYTES, TOKEN_BYTES, Sink
from trainer_bridge.digest import view_of
from trainer_bridge.errors import BridgeError, WireError

if TYPE_CHECKING:
    from trainer_bridge.inbox import Inbox

ACCEPT_S = 10.0
"""Longest that a new connection may take to say who it is, in seconds."""
_JOIN_S = 5.0


class TcpReceiver:
    """Reads pieces from several connections straight into the staging memory.

    A connection opens with the magic, the token of the update and its id, then frames: length of a header, the header (a
    `wire.Data`), the payloads one after the other.
    """

    def __init__(self, host: str, token: bytes, receiver: Sink) -> None:
        self._token, self._receiver = token, receiver
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("" if host == "*" else host, 0), family=family, backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        self._held = threading.Semaphore(HELD_PAYLOADS)
        self._threads = [threading.Thread(target=self._accept, name="specdraft-tcp", daemon=True)]
        self._threads[0].start()

    def join(self, message: wire.Join) -> None:
        """The trainer connects to us. Raises `WireError`."""
        raise WireError("an update over tcp has no group to join")

    def close(self) -> None:
        """Close all connections and wait for their threads."""
        self._closed.set()
        for connection in [self._listener, *self._connections]:
            _shut(connection)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="specdraft-tcp-data", daemon=True)
            self._threads.append(thread)
            thread.start()
            if self._closed.is_set():
                _shut(connection)

    def _serve(self, connection: socket.socket) -> None:
        update = ""
        try:
            connection.settimeout(ACCEPT_S)
            greeting = _exactly(connection, len(MAGIC) + TOKEN_BYTES)
            if not hmac.compare_digest(greeting, MAGIC + self._token):
                return self._receiver.dropped("hostile_connections", "a data connection without the update's token")
            connection.settimeout(None)
            while length := HEADER.unpack(_exactly(connection, HEADER.size))[0]:
                if length > MAX_HEADER_BYTES:
                    raise WireError(f"a data header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
                header = wire.decode_from_trainer(_exactly(connection, length), MAX_HEADER_BYTES)
                if not isinstance(header, wire.Data):
                    raise WireError(f"{type(header).__name__} on a data connection")
                update = header.update
                for piece in header.pieces:
                    self._read(connection, update, piece)
        except (BridgeError, ValueError) as error:
            if not self._closed.is_set():
                self._receiver.data_failed(update, str(error)) if update else self._receiver.dropped("malformed", error)
        except (OSError, EOFError) as error:
            if not self._closed.is_set() and update:
                self._receiver.data_failed(update, f"a data connection broke: {error}")
        finally:
            connection.close()

    def _read(self, connection: socket.socket, update: str, piece: wire.Piece) -> None:
        inbox = self._receiver.inbox
        limit = self._receiver.config.max_data_bytes
        if piece.nbytes > limit:
            raise WireError(f"a piece of {piece.nbytes} bytes, the limit is {limit}")
        box = inbox.box(piece)
        if piece.delta or not box.flags.c_contiguous:
            self._held.acquire(timeout=ACCEPT_S)
            payload = np.empty(piece.nbytes, np.uint8)
            _fill(connection, view_of(payload))

            def put(inbox: Inbox) -> None:
                try:
                    inbox.put(piece, payload)
                finally:
                    self._held.release()

            return self._receiver.pieces_arrived(update, put)
        inbox.overwrites(piece)
        flat = box.reshape(-1).view(np.uint8)
        _fill(connection, view_of(flat))
        self._receiver.pieces_arrived(update, lambda inbox: inbox.check(piece))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError("it ended in the middle of a piece" if at else "it ended")
        at += got


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
