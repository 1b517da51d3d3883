"""CURVE keys of the control plane: making them, and putting them to use on ZeroMQ sockets. Imports no torch.

One directory holds everything. A trainer's host needs ``server.key`` and ``trainer.key_secret``; the server needs
``server.key_secret`` and ``clients/``, whose public keys are those that may connect.
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from trainer_bridge.errors import SecurityError

SERVER, TRAINER, CLIENTS = "server", "trainer", "clients"


def make_keys(directory: Path) -> list[Path]:
    """Make a server's and a trainer's key pair; the files. Raises `SecurityError` when there are keys already."""
    clients = directory / CLIENTS
    if any((directory / f"{name}.key_secret").exists() for name in (SERVER, TRAINER)):
        raise SecurityError(f"{directory} holds keys already: name another directory, or remove them first")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    clients.mkdir(exist_ok=True, mode=0o700)
    zmq.auth.create_certificates(directory, SERVER)
    zmq.auth.create_certificates(directory, TRAINER)
    for name in (SERVER, TRAINER):
        (directory / f"{name}.key_secret").chmod(0o600)
    allowed = clients / f"{TRAINER}.key"
    (directory / f"{TRAINER}.key").rename(allowed)
    return [directory / "server.key", directory / "server.key_secret", directory / "trainer.key_secret", allowed]


def check_server_keys(keys: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a server. Raises `SecurityError` when a file is missing or nobody could connect."""
    found = _load(keys / f"{SERVER}.key_secret")
    if not any((keys / CLIENTS).glob("*.key")):
        raise SecurityError(f"{keys / CLIENTS} holds no public key: nobody could connect; make keys with `specdraft keys DIR`")
    return found


def guard_server(context: zmq.Context, socket: zmq.Socket, keys: Path) -> ThreadAuthenticator:
    """Have a bound-to-be socket take only clients whose key is in ``clients/``; stop what is returned at the end."""
    public, secret = check_server_keys(keys)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(keys / CLIENTS))
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    return authenticator


def guard_client(socket: zmq.Socket, keys: Path) -> None:
    """Have a socket prove who it is, and talk to that server alone."""
    public, secret = _load(keys / f"{TRAINER}.key_secret")
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = _load(keys / f"{SERVER}.key", secret=False)[0]


def _load(path: Path, *, secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public, private = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} is no key file ({error}): make keys with `specdraft keys DIR`") from None
    if secret and private is None:
        raise SecurityError(f"{path} holds no secret key")
    return public, private or b""
