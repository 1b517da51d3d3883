"""What every answer says of the weights it came from: in its headers, and per span of tokens when asked.

vLLM labels the tokens of each step with what was served in it, and its OpenAI routes drop the labels. A recorder per request
keeps them on their way through the engine client, and the middleware writes them down:

- ``X-Specdraft-Policy-Version: 3`` and ``X-Specdraft-Draft-Version: 7``. A full answer that went over an update names all
  of them, the lowest first: ``3, 4``. A stream names what was served when its first piece left; its spans tell the rest.
- A request with ``X-Specdraft-Spans: 1`` gets one more key at the top of the answer's JSON,
  ``"specdraft": {"spans": [[{"policy_version": 3, "draft_version": 7, "start": 0, "end": 17}, ...], ...]}``: one list per
  completion, in the order of ``choices``, over output-token indexes ``[start, end)``. A stream has it in one more chunk, without
  choices, before ``data: [DONE]``; a stream of ``/v1/responses`` in its last event.

The draft version is that of the draft in service when the token was accepted: the first step after a swap still verifies what
the draft before it proposed. Of a label that is none of ours, versions are null (``unknown`` in a header) and the label itself
stands under ``weight_version``. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence, Set
from contextvars import ContextVar
from typing import Any

from vllm_specdraft.versions import parse_label

ROUTES = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
     "/inference/v1/generate", "/invocations"}
)  # fmt: skip
"""Where answers are made, as far as the server has these routes."""
POLICY_HEADER, DRAFT_HEADER = b"x-specdraft-policy-version", b"x-specdraft-draft-version"
SPANS_HEADER = b"x-specdraft-spans"
"""Of a request: ``1`` asks for the spans."""
_KEY = "specdraft"
_DONE = b"data: [DONE]\n\n"
_LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")
_OF_EVERY_CHUNK = ("id", "request_id", "object", "created", "model", "system_fingerprint")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Versions = Set[tuple[int, int] | None]
"""Pairs of policy and draft version, None for a label that is none of ours."""


class Recorder:
    """What the engine says of the completions of one HTTP request."""

    def __init__(self) -> None:
        # Per engine request, in the order of the prompts: the spans of its finished completions by their index.
        self._requests: list[dict[int, Sequence[Any]]] = []
        self._has_output = self._in_turns = False

    def follow(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The outputs of one engine request, as they come. Called once for each, in the order of the prompts."""
        # What is asked of the engine after it answered is another turn of the same answer.
        self._in_turns |= self._has_output
        finished: dict[int, Sequence[Any]] = {}
        self._requests.append(finished)
        return self._watch(outputs, finished)

    async def _watch(self, outputs: AsyncGenerator[Any, None], finished: dict[int, Sequence[Any]]) -> AsyncGenerator[Any, None]:
        try:
            async for output in outputs:
                self._has_output = True
                for completion in output.outputs:
                    if completion.finish_reason is not None:
                        # A stop string may take back all tokens of the last step, and leave a span of none.
                        spans = completion.weight_versions or ()
                        finished[completion.index] = [span for span in spans if span.start < span.end]
                yield output
        finally:
            # The engine aborts a request when its outputs are closed, which must not wait for the garbage collector.
            await outputs.aclose()

    def versions(self) -> Versions:
        """All that the finished completions came from."""
        spans = (span for finished in self._requests for completion in finished.values() for span in completion)
        return {parse_label(span.version) for span in spans}

    def spans(self) -> list[list[dict[str, Any]]] | None:
        """Per completion its spans; none yet for one that is not finished.

        None when one answer was made out of several turns with the engine (beam search, built-in tools): the engine's
        completions are then not the answer's.
        """
        if self._in_turns:
            return None
        return [
            [_facts(span) for span in finished.get(index, ())]
            for finished in self._requests
            for index in range(max(finished, default=0) + 1)
        ]


RECORDER: ContextVar[Recorder | None] = ContextVar("specdraft_recorder", default=None)
"""The recorder of the request that is being answered; see `patches.answers_know_their_versions`."""


class Answers:
    """ASGI middleware that makes every answer say what it came from. Errors and other routes pass as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer back."""
        if not makes_answer(scope, ROUTES):
            return await self._app(scope, receive, send)
        recorder = Recorder()
        token = RECORDER.set(recorder)
        try:
            await self._app(scope, receive, _Outgoing(scope, send, recorder))
        finally:
            RECORDER.reset(token)


def makes_answer(scope: Scope, routes: frozenset[str]) -> bool:
    """Whether this is an HTTP request to one of the `routes` that asks for an answer."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in routes


class _Outgoing:
    """One answer on its way out.

    Its start waits for the first piece of the body: before that, no token is there that could have a version. A full answer
    that gets its spans waits for its end, too, a stream never.
    """

    def __init__(self, scope: Scope, send: Send, recorder: Recorder) -> None:
        self._scope, self._send, self._recorder = scope, send, recorder
        self._asked = any(name == SPANS_HEADER and value.strip() == b"1" for name, value in scope["headers"])
        self._start: Message | None = None
        self._is_stream = self._is_json = False
        self._body = b""
        self._chunk: dict[str, Any] | None = None

    async def __call__(self, message: Message) -> None:
        """Send one message of the app, or keep it for the next one."""
        if message["type"] == "http.response.start" and message["status"] < 400:
            self._start = message
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            self._is_stream, self._is_json = kind.startswith(b"text/event-stream"), kind.startswith(b"application/json")
            return
        if message["type"] == "http.response.body" and self._asked:
            if self._is_stream:
                message = {**message, "body": self._with_event(message.get("body", b""))}
            elif self._is_json:
                self._body += message.get("body", b"")
                if message.get("more_body", False):
                    return
                message = {"type": "http.response.body", "body": self._with_key(self._body)}
        if self._start is not None:
            start, self._start = self._start, None
            await self._send({**start, "headers": self._headers(start["headers"], message)})
        await self._send(message)

    def _headers(self, given: Sequence[tuple[bytes, bytes]], message: Message) -> list[tuple[bytes, bytes]]:
        headers = list(given)
        if self._is_json and self._asked:
            length = str(len(message.get("body", b""))).encode()
            headers = [(name, length if name.lower() == b"content-length" else value) for name, value in headers]
        versions = _served(self._scope) if self._is_stream else self._recorder.versions()
        return [*headers, *_version_headers(versions)]

    def _entry(self) -> bytes:
        """The key and its value, to be put in front of the brace that ends an object."""
        return b'"%s":%s' % (_KEY.encode(), _dump({"spans": self._recorder.spans()}))

    def _with_key(self, body: bytes) -> bytes:
        # Not parsed: an answer with log-probabilities has megabytes.
        if not (body.startswith(b"{") and body.endswith(b"}")):
            return body
        inner = body[:-1].rstrip()
        return inner + (b"" if inner == b"{" else b",") + self._entry() + b"}"

    def _with_event(self, piece: bytes) -> bytes:
        if self._chunk is None:
            self._chunk = _chunk_like(piece)
        if piece == _DONE or piece.endswith(b"\n" + _DONE):
            chunk = {**(self._chunk or {}), "choices": [], _KEY: {"spans": self._recorder.spans()}}
            return piece.removesuffix(_DONE) + b"data: " + _dump(chunk) + b"\n\n" + _DONE
        if piece.startswith(_LAST_EVENTS) and piece.endswith(b"}\n\n"):
            return piece.removesuffix(b"}\n\n") + b"," + self._entry() + b"}\n\n"
        return piece


def _facts(span: Any) -> dict[str, Any]:
    """What the answer tells of a span: vLLM's ``version``, ``start`` and ``end`` in our words."""
    policy, draft = parse_label(span.version) or (None, None)
    facts = {"policy_version": policy, "draft_version": draft, "start": span.start, "end": span.end}
    return facts if policy is not None else {**facts, "weight_version": span.version}


def _served(scope: Scope) -> Versions:
    """What the server serves at present, as far as it is known."""
    link = getattr(scope["app"].state, "specdraft", None)
    return set() if link is None else {(getattr(link, "policy_version", 0), getattr(link, "draft_version", 0))}


def _version_headers(versions: Versions) -> list[tuple[bytes, bytes]]:
    if not versions:
        return []
    headers = []
    for place, name in enumerate((POLICY_HEADER, DRAFT_HEADER)):
        numbers = sorted({version[place] for version in versions if version is not None})
        headers.append((name, ", ".join([*map(str, numbers), *(["unknown"] if None in versions else [])]).encode()))
    return headers


def _chunk_like(piece: bytes) -> dict[str, Any] | None:
    """What all chunks of a stream share, from a piece that holds one; None when it holds none."""
    for line in piece.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                chunk = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                return None
            return {key: chunk[key] for key in _OF_EVERY_CHUNK if key in chunk}
    return None


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
