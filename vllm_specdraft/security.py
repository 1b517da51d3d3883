"""Who may change what: the rule for the address that is bound, and the guard in front of every route.

vLLM's own API key covers ``/v1`` and a few more prefixes. The routes that pause the engine, load adapters or change weights, and
ours, are elsewhere: the guard covers all that is not a mere read. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from trainer_bridge import config as addresses
from trainer_bridge.errors import ConfigError
from vllm_specdraft.config import SettingsError

GUARD = "vllm_specdraft.security.Guard"
"""For vLLM's ``--middleware``: a guard that cannot be imported keeps the server from starting."""
KEY_VARIABLE = "VLLM_API_KEY"
READS = frozenset({"GET", "HEAD", "OPTIONS"})
NEVER = "collective_rpc"
"""Route of vLLM's development mode that calls any method of the workers by name: no key opens it."""
PRIVATE_READS = ("/server_info",)
"""Reads that tell about the machine and its environment."""
WEIGHT_ROUTES = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
     "/finish_weight_update", "/weight_checker"}
)  # fmt: skip
"""Routes of vLLM that write weights behind the learner's back: its teacher, its samples and its account of the served draft would
be of other weights, and nothing would say so."""
ANSWERS = ("/v1/", "/v2/", "/inference/", "/cohere/")
"""Prefixes under which answers are made. Without a key, a web page that the server allows may ask there."""
CHANGES_AMONG_ANSWERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
BACKEND = "specdraft"
"""The one backend of vLLM's weight transfer that the plugin stands behind."""
_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    503: "ServiceUnavailableError",
}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def keys_of(given: Sequence[str] | None, environ: Mapping[str, str]) -> list[str]:
    """The keys in force, as vLLM takes them: ``--api-key`` if given, else the environment; empty ones do not count."""
    return [key for key in (given or [environ.get(KEY_VARIABLE, "")]) if key]


def refuse_open_bind(*, host: str, uds: str | None, keys: Sequence[str], insecure: bool) -> str | None:
    """Refuse to listen beyond this machine without a key. Returns a warning when that is asked for all the same.

    A Unix socket counts as this machine: it is for those who may write the file.
    """
    if keys or uds or is_loopback(host):
        return None
    place = f"--host {host}" if host else "an empty --host (all interfaces)"
    if insecure:
        return f"WARNING: {place} without an API key (--insecure): whoever reaches the port can change drafts, weights and state"
    raise SettingsError(
        f"{place} is open to other machines and there is no API key: add --api-key KEY (or set {KEY_VARIABLE}), "
        "stay on this machine with --host 127.0.0.1, or add --insecure if the network itself keeps others out"
    )


def is_loopback(host: str) -> bool:
    """Whether binding `host` is reachable from this machine alone. Raises `SettingsError` for a name that does not resolve."""
    try:
        # What is bound is what the name means to the system: "0" and "127.1" are addresses, too.
        return addresses.is_loopback(host)
    except ConfigError as error:
        raise SettingsError(f"--host {error}") from None


class Guard:
    """ASGI middleware around the whole app: with a key in force, all that changes something needs it.

    - ``/collective_rpc`` is not there, whatever the method and the key.
    - With a key: every request but a read needs ``Authorization: Bearer KEY``, and so do private reads and websockets. Reads stay
      open here (health, metrics, status); vLLM's own check still covers ``/v1`` and the like.
    - Without one: what changes something is refused to web pages of other origins. A browser sends some of these requests
      without asking first, and a page can make its own name point to 127.0.0.1; it cannot forge the ``Origin``.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        args = scope["app"].state.args
        refusal = _refusal(scope, keys_of(args.api_key, os.environ), args.allowed_origins)
        if refusal is None:
            return await self._app(scope, receive, send)
        return await send_error(scope, send, *refusal)


def _refusal(scope: _Scope, keys: Sequence[str], allowed_origins: Sequence[str]) -> tuple[int, str] | None:
    """Status and message when a request may not pass."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    # Any segment, so that no prefix a proxy or a mount adds lets it through.
    if NEVER in scope["path"].split("/"):
        return 404, "Not Found"
    is_read = scope["type"] == "http" and scope["method"] in READS and not path.startswith(PRIVATE_READS)
    if keys:
        if is_read or _has_key(_header(scope, b"authorization"), keys):
            return None if is_read else _conflict(path, scope)
        return 401, "this route needs the server's API key: send `Authorization: Bearer KEY`"
    makes_answers = path.startswith(ANSWERS) and not path.startswith(CHANGES_AMONG_ANSWERS) and scope["type"] == "http"
    if is_read or makes_answers:
        return None
    if _is_own_origin(scope, allowed_origins):
        return _conflict(path, scope)
    return 403, "a web page of another origin may not change this server: give the server an --api-key and send it"


def _conflict(path: str, scope: _Scope) -> tuple[int, str] | None:
    path = path.rstrip("/")
    if path not in WEIGHT_ROUTES:
        return None
    transfer = getattr(scope["app"].state.args, "weight_transfer_config", None)
    backend = transfer.get("backend") if isinstance(transfer, dict) else getattr(transfer, "backend", None)
    if backend == BACKEND and path != "/weight_checker":
        # They end in the plugin, which knows what it serves.
        return None
    return (
        409,
        "the target's weights cannot change behind a draft that learns from it: bring them with `trainer_bridge`, or with vLLM's "
        f"""client and --weight-transfer-config '{{"backend": "{BACKEND}"}}'; `specdraft serve --plain` has its other backends""",
    )


def _has_key(authorization: bytes | None, keys: Sequence[str]) -> bool:
    """Whether the header carries one of the keys; takes as long for a wrong one as for a right one."""
    scheme, _, given = (authorization or b"").partition(b" ")
    digest = hashlib.sha256(given).digest()
    # All are compared, whichever fits.
    fits = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return scheme.lower() == b"bearer" and any(fits)


def _is_own_origin(scope: _Scope, allowed: Sequence[str]) -> bool:
    """Whether a request comes from no web page at all, or from one that this server allows by name or served itself."""
    origin = _header(scope, b"origin")
    if origin is None:
        return True
    text = origin.decode("latin-1")
    if text in allowed:
        return True
    try:
        parts = urlsplit(text)
        # A page of a name that merely points here has that name as its host, in both headers.
        loopback = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
    return loopback and parts.netloc.encode("latin-1") == _header(scope, b"host")


def _header(scope: _Scope, name: bytes) -> bytes | None:
    return next((value for found, value in scope["headers"] if found.lower() == name), None)


async def send_error(scope: _Scope, send: _Send, status: int, message: str) -> None:
    """Answer with an error as vLLM words it; a websocket is closed before it opens."""
    if scope["type"] == "websocket":
        # 1008: policy violation (RFC 6455, 7.4.1).
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    body = json.dumps({"error": {"message": message, "type": _KINDS[status], "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    # The server leaves the body out for HEAD.
    await send({"type": "http.response.body", "body": body})
