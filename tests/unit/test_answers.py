"""Catches an answer that says nothing, or the wrong thing, of the weights it came from; a stream that is held back or broken for
it; and traffic that is let in before the wanted policy is served.

The app is driven by its ASGI messages: what is asked of a stream is when its pieces leave.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from vllm_specdraft import answers
from vllm_specdraft.admission import Admission
from vllm_specdraft.answers import RECORDER, Answers
from vllm_specdraft.versions import parse_label, version_label

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"X-Specdraft-Spans": "1"}
OLD, NEW = version_label(3, 7), version_label(4, 8)
Spans = Sequence[tuple[str, int, int]]


class Engine:
    """What the middleware sees of an engine: requests whose outputs come one token at a time."""

    def __init__(self) -> None:
        self.closed: list[bool] = []
        """Per request that was begun, whether its outputs were closed."""
        self.before_token: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)

    def generate(self, completions: Sequence[Spans | None]) -> AsyncGenerator[Any, None]:
        """One engine request, as the patch of vLLM's client gives it; `completions`: the spans of each of its ``n``."""
        outputs, recorder = self._outputs(completions), RECORDER.get()
        return outputs if recorder is None else recorder.follow(outputs)

    async def _outputs(self, completions: Sequence[Spans | None]) -> AsyncGenerator[Any, None]:
        number = len(self.closed)
        self.closed.append(False)
        try:
            lengths = [max((end for _, _, end in spans or ()), default=0) for spans in completions]
            for step in range(max(lengths)):
                await self.before_token()
                yield output([completion(i, None) for i, length in enumerate(lengths) if step < length])
            # The last one finishes first: its choice is last all the same.
            for i in reversed(range(len(completions))):
                yield output([completion(i, completions[i], reason="stop")])
        finally:
            self.closed[number] = True


def output(completions: list[Any]) -> Any:
    return SimpleNamespace(outputs=completions)


def completion(index: int, spans: Spans | None, *, reason: str | None = None) -> Any:
    found = [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans] if spans is not None else None
    return SimpleNamespace(index=index, finish_reason=reason, weight_versions=found)


async def merged(generators: Sequence[AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """Outputs of several requests as they come, the last request's first."""
    for generator in reversed(generators):
        async for found in generator:
            yield found


def build(engine: Engine, **served: int) -> FastAPI:
    """A server whose request bodies say what the engine answers: ``{"requests": [[SPANS, ...], ...], "stream": ...}``."""
    app = FastAPI()

    async def answer(raw: Request) -> Any:
        body = await raw.json()
        if "error" in body:
            return JSONResponse({"error": {"code": body["error"]}}, status_code=body["error"])
        generators = [engine.generate(completions) for completions in body["requests"]]
        head = {"id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m"}
        if not body.get("stream"):
            async for _ in merged(generators):
                pass
            count = sum(map(len, body["requests"]))
            return JSONResponse({**head, "choices": [{"index": i, "text": '"data": {"}'} for i in range(count)]})

        async def events() -> AsyncGenerator[str, None]:
            if body.get("keep_alive"):
                yield ": keep-alive\n\n"
            async for found in merged(generators):
                for each in found.outputs:
                    chunk = {**head, "choices": [{"index": each.index, "text": "data: [DONE]\n\n"}], "usage": None}
                    yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def respond(raw: Request) -> Any:
        """As /v1/responses streams: typed events, the first before any token, and no ``[DONE]``."""
        generator = engine.generate((await raw.json())["requests"][0])

        async def events() -> AsyncGenerator[str, None]:
            yield 'event: response.created\ndata: {"type":"response.created"}\n\n'
            async for _ in generator:
                yield 'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'
            yield 'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    async def turns(raw: Request) -> Any:
        """One answer out of two engine requests, one after the other, as beam search makes it."""
        for completions in (await raw.json())["requests"]:
            async for _ in engine.generate(completions):
                pass
        return JSONResponse({"choices": [{"index": 0}]})

    async def plain() -> Any:
        return PlainTextResponse("text")

    app.add_api_route(COMPLETIONS, answer, methods=["POST", "GET"])
    app.add_api_route(CHAT, turns, methods=["POST"])
    app.add_api_route("/v1/responses", respond, methods=["POST"])
    app.add_api_route("/inference/v1/generate", plain, methods=["POST"])
    app.add_api_route("/tokenize", answer, methods=["POST"])
    app.add_middleware(Answers)
    if served:
        app.state.specdraft = SimpleNamespace(**served)
    return app


@dataclass
class Answer:
    """What one request was sent."""

    messages: list[Any] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        assert self.messages[0]["type"] == "http.response.start"
        return {name.decode().lower(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def versions(self) -> tuple[str | None, str | None]:
        """Policy and draft version by the headers."""
        return self.headers.get("x-specdraft-policy-version"), self.headers.get("x-specdraft-draft-version")

    @property
    def pieces(self) -> list[bytes]:
        return [message.get("body", b"") for message in self.messages if message["type"] == "http.response.body"]

    @property
    def json(self) -> Any:
        body = b"".join(self.pieces)
        assert int(self.headers["content-length"]) == len(body)
        return json.loads(body)

    @property
    def chunks(self) -> list[Any]:
        """The data of all events but the last, which is ``[DONE]``."""
        lines = [line for line in b"".join(self.pieces).split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]

    @property
    def spans(self) -> Any:
        """Of a full answer, as ``(policy, draft, start, end)``."""
        return tuples(self.json["specdraft"]["spans"])


def tuples(spans: Any) -> Any:
    names = ("policy_version", "draft_version", "start", "end")
    return [[tuple(span[name] for name in names) for span in completion] for completion in spans]


async def ask(
    app: Any,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    method: str = "POST",
    on_piece: Callable[[Answer], bool] = lambda _: False,
) -> Answer:
    """One request. `on_piece` sees the answer after each message; the client hangs up when it is true."""
    answer, gone = Answer(), asyncio.Event()
    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2), "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    inbox = [{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.messages.append(message)
        if on_piece(answer):
            gone.set()

    await app(scope, receive, send)
    return answer


def one(
    path: str = COMPLETIONS, *, headers: dict[str, str] | None = None, served: dict[str, int] | None = None, **body: Any
) -> Answer:
    """One request to a server of its own."""

    async def run() -> Answer:
        return await ask(build(Engine(), **(served or {})), path, body, headers=headers)

    return asyncio.run(run())


# Labels.


def test_a_label_names_both_versions_and_is_read_back() -> None:
    assert parse_label(version_label(0, 0)) == (0, 0)
    assert parse_label(version_label(12, 345)) == (12, 345)


@pytest.mark.parametrize(
    "label",
    ["default", "", "policy-1", "policy-/draft-2", "policy-1/draft-2 ", "policy--1/draft-2", "policy-1/draft-x",
     "policy-1/draft-2\n", "policy-٣/draft-2", "xpolicy-1/draft-2", "policy-1/draft-" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_label_of_ours_is_none(label: str) -> None:
    assert parse_label(label) is None


# Full answers.


def test_a_full_answer_names_what_it_came_from() -> None:
    answer = one(requests=[[[(OLD, 0, 5)]]])
    assert answer.versions == ("3", "7")
    assert "specdraft" not in answer.json, "nobody asked"


def test_an_answer_that_went_over_an_update_names_both() -> None:
    assert one(requests=[[[(OLD, 0, 2), (NEW, 2, 5)]]]).versions == ("3, 4", "7, 8")
    back = version_label(3, 9)
    assert one(requests=[[[(NEW, 0, 2), (back, 2, 5)]]]).versions == ("3, 4", "8, 9"), "a rollback of the policy is a new draft"
    draft_only = version_label(3, 9)
    assert one(requests=[[[(OLD, 0, 2), (draft_only, 2, 5)]]]).versions == ("3", "7, 9")


def test_the_versions_of_all_completions_are_named_the_lowest_first() -> None:
    """One that began after the update stands before one that began ahead of it; 10 comes after 9."""
    assert one(requests=[[[(NEW, 0, 5)], [(OLD, 0, 2), (NEW, 2, 5)]]]).versions == ("3, 4", "7, 8")
    assert one(requests=[[[(NEW, 0, 5)]], [[(OLD, 0, 2)]]]).versions == ("3, 4", "7, 8")
    last = version_label(10, 9)
    assert one(requests=[[[(last, 0, 5)], [(OLD, 0, 2), (NEW, 2, 5)]]]).versions == ("3, 4, 10", "7, 8, 9")


def test_spans_come_when_asked_and_the_length_is_right() -> None:
    answer = one(headers=ASKED, requests=[[[(OLD, 0, 2), (NEW, 2, 5)]]])
    assert answer.spans == [[(3, 7, 0, 2), (4, 8, 2, 5)]]
    assert {key: value for key, value in answer.json.items() if key != "specdraft"} == {
        "id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m", "choices": [{"index": 0, "text": '"data": {"}'}],
    }  # fmt: skip
    assert answer.versions == ("3, 4", "7, 8")


@pytest.mark.parametrize("value", ["0", "", "no"])
def test_other_words_do_not_ask(value: str) -> None:
    assert "specdraft" not in one(headers={"X-Specdraft-Spans": value}, requests=[[[(OLD, 0, 2)]]]).json


def test_spans_are_in_the_order_of_choices() -> None:
    """Two prompts with ``n`` of 2; both the last prompt and the last completion come first from the engine."""
    requests = [[[(version_label(1, 2 * prompt + i), 0, 3 - i)] for i in range(2)] for prompt in range(2)]
    assert one(headers=ASKED, requests=requests).spans == [[(1, 0, 0, 3)], [(1, 1, 0, 2)], [(1, 2, 0, 3)], [(1, 3, 0, 2)]]


def test_a_completion_without_tokens_or_labels_keeps_its_place() -> None:
    answer = one(headers=ASKED, requests=[[None, [], [(OLD, 0, 2), (NEW, 2, 2)]]])
    assert answer.spans == [[], [], [(3, 7, 0, 2)]], "a span of no tokens is none"
    assert answer.versions == ("3", "7")


def test_a_label_of_somebody_else_is_told_as_it_is() -> None:
    answer = one(headers=ASKED, requests=[[[("default", 0, 2), (OLD, 2, 5)]]])
    assert answer.json["specdraft"]["spans"] == [
        [
            {"policy_version": None, "draft_version": None, "start": 0, "end": 2, "weight_version": "default"},
            {"policy_version": 3, "draft_version": 7, "start": 2, "end": 5},
        ]
    ]
    assert answer.versions == ("3, unknown", "7, unknown")
    broken = one(requests=[[[("a\r\nSet-Cookie: x", 0, 2)]]])
    assert broken.versions == ("unknown", "unknown")


def test_turns_of_one_answer_are_not_taken_for_completions() -> None:
    answer = one(CHAT, headers=ASKED, requests=[[[(OLD, 0, 1)]], [[(NEW, 0, 1)]]])
    assert answer.json["specdraft"] == {"spans": None}
    assert answer.versions == ("3, 4", "7, 8")
    assert one(CHAT, headers=ASKED, requests=[[[(OLD, 0, 1)]]]).spans == [[(3, 7, 0, 1)]]


# Streams.


def test_a_stream_names_what_was_served_when_it_began() -> None:
    answer = one(stream=True, requests=[[[(OLD, 0, 2), (NEW, 2, 5)]]], served={"policy_version": 3, "draft_version": 7})
    assert answer.versions == ("3", "7")
    assert all("specdraft" not in chunk for chunk in answer.chunks)


def test_a_stream_s_headers_wait_for_its_first_token() -> None:
    """What was served when the request came in may be replaced before a token is made."""

    async def run() -> None:
        engine, may_begin = Engine(), asyncio.Event()
        engine.before_token = may_begin.wait
        app = build(engine, policy_version=3, draft_version=7)
        asking = asyncio.create_task(ask(app, COMPLETIONS, {"stream": True, "requests": [[[(NEW, 0, 3)]]]}))
        for _ in range(50):
            await asyncio.sleep(0)
        app.state.specdraft.policy_version, app.state.specdraft.draft_version = 4, 8
        may_begin.set()
        assert (await asking).versions == ("4", "8")

    asyncio.run(run())


def test_a_stream_is_never_held_back() -> None:
    """Each piece leaves before the engine is asked for the next token, whether spans are asked for or not."""

    async def run(headers: dict[str, str]) -> None:
        # One token may be made at first, and one more for each piece that left.
        engine, permits = Engine(), asyncio.Semaphore(1)
        engine.before_token = permits.acquire
        app = build(engine, policy_version=3, draft_version=7)

        def on_piece(answer: Answer) -> bool:
            if answer.messages[-1]["type"] == "http.response.body":
                permits.release()
            return False

        body = {"stream": True, "requests": [[[(OLD, 0, 4)]]]}
        async with asyncio.timeout(10):
            answer = await ask(app, COMPLETIONS, body, headers=headers, on_piece=on_piece)
        # A start, four tokens, the end, [DONE], and the empty piece that ends the body.
        assert len(answer.messages) == 8

    asyncio.run(run({}))
    asyncio.run(run(ASKED))


@pytest.mark.parametrize("keep_alive", [False, True])
def test_a_stream_gets_one_more_chunk_when_asked(keep_alive: bool) -> None:
    requests = [[[(OLD, 0, 2), (NEW, 2, 3)], [(OLD, 0, 1)]]]
    plain = one(stream=True, keep_alive=keep_alive, requests=requests)
    answer = one(headers=ASKED, stream=True, keep_alive=keep_alive, requests=requests)
    *chunks, last = answer.chunks
    assert chunks == plain.chunks, "the others are as they were"
    assert {key: value for key, value in last.items() if key != "specdraft"} == {
        "id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m", "choices": [],
    }  # fmt: skip
    assert tuples(last["specdraft"]["spans"]) == [[(3, 7, 0, 2), (4, 8, 2, 3)], [(3, 7, 0, 1)]]
    assert b"".join(answer.pieces).count(b"data: [DONE]\n\n") == 1
    assert b"".join(answer.pieces).endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("pieces", "extra"),
    [
        ([b'data: {"id":"c","choices":[]}\n\ndata: [DONE]\n\n'], b'data: {"id":"c","choices":[],"specdraft":{"spans":[]}}\n\n'),
        ([b'data: {"error":{"code":500}}\n\n', b"data: [DONE]\n\n"], b'data: {"choices":[],"specdraft":{"spans":[]}}\n\n'),
        ([b"data: {broken\n\n", b"data: [DONE]\n\n"], b'data: {"choices":[],"specdraft":{"spans":[]}}\n\n'),
        ([b": not at the start of a line data: [DONE]\n\n"], b""),
        ([b"data: [DONE]\n\n more"], b""),
    ],
)
def test_the_chunk_stands_before_the_end_of_the_stream_and_nowhere_else(pieces: list[bytes], extra: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
        )
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def served(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace())
        await Answers(app)(scope, receive, send)

    answer = asyncio.run(ask(served, COMPLETIONS, headers=ASKED))
    body = b"".join(pieces)
    assert b"".join(answer.pieces) == (body.removesuffix(b"data: [DONE]\n\n") + extra + b"data: [DONE]\n\n" if extra else body)


def test_a_stream_of_responses_has_the_spans_in_its_last_event() -> None:
    served = {"policy_version": 3, "draft_version": 7}
    answer = one("/v1/responses", headers=ASKED, requests=[[[(OLD, 0, 2), (NEW, 2, 5)]]], served=served)
    events = b"".join(answer.pieces).decode().strip().split("\n\n")
    assert not any("specdraft" in event for event in events[:-1])
    last = json.loads(events[-1].removeprefix("event: response.completed\ndata: "))
    assert (last["type"], last["response"]) == ("response.completed", {"id": "r"})
    assert tuples(last["specdraft"]["spans"]) == [[(3, 7, 0, 2), (4, 8, 2, 5)]]
    assert answer.versions == ("3", "7")


def test_a_server_that_does_not_know_what_it_serves_says_nothing() -> None:
    answer = one(stream=True, requests=[[[(OLD, 0, 2)]]])
    assert answer.versions == (None, None)
    assert answer.chunks


def test_a_client_that_hangs_up_frees_its_request() -> None:
    async def run() -> None:
        engine = Engine()
        app = build(engine, policy_version=3, draft_version=7)
        body = {"stream": True, "requests": [[[(OLD, 0, 10_000)]]]}
        async with asyncio.timeout(30):
            answer = await ask(app, COMPLETIONS, body, headers=ASKED, on_piece=lambda answer: len(answer.messages) > 3)
        assert len(answer.messages) < 10_000
        assert engine.closed == [True], "the engine would go on for nobody"
        assert RECORDER.get() is None

    asyncio.run(run())


def test_outputs_that_nobody_reads_to_their_end_are_closed_at_once() -> None:
    async def run() -> None:
        engine, recorder = Engine(), answers.Recorder()
        token = RECORDER.set(recorder)
        outputs = engine.generate([[(OLD, 0, 3)]])
        RECORDER.reset(token)
        await anext(outputs)
        await outputs.aclose()
        assert engine.closed == [True]
        assert recorder.versions() == set() and recorder.spans() == [[]]

    asyncio.run(run())


# Others.


@pytest.mark.parametrize("code", [400, 404, 422, 500, 503])
def test_an_error_states_no_version(code: int) -> None:
    answer = one(headers=ASKED, error=code, served={"policy_version": 3, "draft_version": 7})
    assert answer.status == code
    assert answer.versions == (None, None)
    assert answer.json == {"error": {"code": code}}


def test_an_exception_is_the_app_s_own_matter() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(ask(Answers(failing), COMPLETIONS))


def test_other_routes_and_reads_are_untouched() -> None:
    """Neither a header nor a recorder."""

    async def run() -> None:
        app = build(Engine(), policy_version=3, draft_version=7)
        body = {"requests": [[[(OLD, 0, 2)]]]}
        for path, method in (("/tokenize", "POST"), (COMPLETIONS, "GET")):
            answer = await ask(app, path, body, headers=ASKED, method=method)
            assert answer.status == 200
            assert answer.versions == (None, None)
            assert "specdraft" not in answer.json

    asyncio.run(run())


def test_a_body_that_is_no_json_passes_as_it_is() -> None:
    answer = one("/inference/v1/generate", headers=ASKED)
    assert answer.pieces == [b"text"]
    assert answer.headers["content-length"] == "4"


@pytest.mark.parametrize(("body", "wanted"), [(b"{}", {"specdraft": {"spans": []}}), (b"[1, 2]", [1, 2]), (b'{"a": 1} ', {"a": 1})])
def test_only_an_object_gets_a_key(body: bytes, wanted: Any) -> None:
    """In pieces, and with headers in other letters."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:1], "more_body": True})
        await send({"type": "http.response.body", "body": body[1:]})

    answer = asyncio.run(ask(Answers(app), COMPLETIONS, headers=ASKED))
    assert answer.json == wanted


def test_a_mounted_server_answers_under_its_prefix() -> None:
    async def run() -> Answer:
        outer = FastAPI()
        outer.mount("/engine", build(Engine()))
        return await ask(outer, "/engine" + COMPLETIONS, {"requests": [[[(OLD, 0, 5)]]]})

    assert asyncio.run(run()).versions == ("3", "7")


def test_requests_at_the_same_time_do_not_mix() -> None:
    async def run() -> None:
        engine = Engine()
        app = build(engine, policy_version=0, draft_version=0)

        async def check(number: int) -> None:
            length, stream = 1 + number % 7, number % 3 == 0
            body = {"stream": stream, "requests": [[[(version_label(number, 2 * number), 0, length)]]]}
            answer = await ask(app, COMPLETIONS, body, headers=ASKED if number % 2 else {})
            if number % 2:
                entry = answer.chunks[-1] if stream else answer.json
                assert tuples(entry["specdraft"]["spans"]) == [[(number, 2 * number, 0, length)]]
            if not stream:
                assert answer.versions == (str(number), str(2 * number))

        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(check(number))
        assert all(engine.closed) and len(engine.closed) == 60

    asyncio.run(run())


# Admission.


def gated(app: Any, minimum: int) -> Any:
    app.add_middleware(Admission, min_policy_version=minimum)
    return app


def test_no_answers_before_the_wanted_policy_is_served() -> None:
    """C13."""

    async def run() -> None:
        app = gated(build(Engine(), policy_version=2, draft_version=7), 3)
        body = {"requests": [[[(OLD, 0, 5)]]]}
        for path in (COMPLETIONS, CHAT, "/v1/responses", "/inference/v1/generate", "/v1/chat/completions/batch", "/v1/messages"):
            refused = await ask(app, path, body)
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"
            error = refused.json["error"]
            assert (error["type"], error["code"], error["param"]) == ("ServiceUnavailableError", 503, None)
            assert "policy version 2 is served" in error["message"] and "version 3" in error["message"]
            assert refused.versions == (None, None)
        assert (await ask(app, "/tokenize", body)).status == 200, "no answer is made there"
        assert (await ask(app, COMPLETIONS, body, method="GET")).status == 200
        app.state.specdraft.policy_version = 3
        assert (await ask(app, COMPLETIONS, body)).versions == ("3", "7")

    asyncio.run(run())


def test_a_server_that_does_not_say_what_it_serves_serves_version_0() -> None:
    async def run(minimum: int) -> int:
        return (await ask(gated(build(Engine()), minimum), COMPLETIONS, {"requests": [[[(OLD, 0, 5)]]]})).status

    assert asyncio.run(run(1)) == 503
    assert asyncio.run(run(0)) == 200, "nothing is waited for unless asked"
