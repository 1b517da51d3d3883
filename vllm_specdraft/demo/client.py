"""A small asynchronous HTTP client of one server: answers with their token ids, and the routes under /specdraft."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

MODEL = "specdraft"
_DECODE_TIME = "vllm:request_decode_time_seconds"
_GENERATED = "vllm:generation_tokens_total"
_FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
_TOKEN_PREFIX = "token_id:"
_FRESH_WAIT_S = 15.0
_FRESH_POLL_S = 0.1

T = TypeVar("T")


class RequestError(RuntimeError):
    """A server did not answer, or answered with an error. The text names the request and the server's log file."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is sampled."""

    max_tokens: int
    """Longest answer; it may end earlier by itself."""
    temperature: float = 0.0
    """0 is greedy. Nucleus and top-k cuts are always off, whatever the model's own generation config says."""
    seed: int | None = None
    """Seed of this request's random numbers; None lets the server choose."""
    ignore_end: bool = False
    """Generate `max_tokens` tokens, whatever the model says; for timings of equal length."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer."""

    prompt_ids: tuple[int, ...]
    """The prompt as the server tokenised it, chat template included."""
    token_ids: tuple[int, ...]
    """The generated tokens, an end token included."""
    text: str
    """The generated text."""
    wall_s: float
    """Wall time from sending the request to its whole answer, prefill included."""


@dataclass(frozen=True, kw_only=True)
class StreamTimes:
    """When the parts of one streamed answer came."""

    ttft_s: float
    """From sending the request to its first token."""
    gaps_s: tuple[float, ...]
    """Between one part and the next; a part holds the tokens of one step."""


@dataclass(frozen=True, kw_only=True)
class DecodeTime:
    """Sum over finished requests of the time from the first to the last token, as the server itself measures it."""

    requests: float
    """Finished requests."""
    seconds: float
    """Their decode time together."""


def metric_total(text: str, name: str) -> float | None:
    """The sum over all label sets of one sample name in Prometheus text; None when the name does not occur."""
    total = None
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample == name or sample.startswith(name + "{"):
            total = (total or 0.0) + float(value)
    return total


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Client:
    """Speaks to one server. Use as an asynchronous context manager."""

    def __init__(self, url: str, *, log_path: Path, timeout_s: float = 600.0) -> None:
        """`url`: like ``http://127.0.0.1:8000``. `log_path`: named in errors. `timeout_s`: deadline of every request."""
        self.url = self._url = url.rstrip("/")
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No connection is kept: the server drops idle ones after a few seconds, which would race with the next request.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def chat(self, question: str, sampling: Sampling, *, salt: str | None = None) -> Answer:
        """Answer one user message.

        `salt` keeps the request out of every other request's prefix cache entries: in a comparison no arm may find
        its prompt already computed. Raises `RequestError`.
        """
        body = _chat_body(question, sampling, salt)
        started = time.perf_counter()
        reply = await self.call("POST", "/v1/chat/completions", body)
        wall_s = time.perf_counter() - started
        choice = reply["choices"][0]
        if choice.get("token_ids") is None or reply.get("prompt_token_ids") is None:
            raise RequestError(f"POST {self._url}/v1/chat/completions returned no token ids: is this a vLLM server?")
        return Answer(
            prompt_ids=tuple(reply["prompt_token_ids"]),
            token_ids=tuple(choice["token_ids"]),
            text=choice["message"].get("content") or "",
            wall_s=wall_s,
        )

    async def stream(self, question: str, sampling: Sampling, *, salt: str | None = None) -> StreamTimes:
        """Answer one user message as a stream, and say when its parts came. Raises `RequestError`."""
        body = {**_chat_body(question, sampling, salt), "stream": True}
        times = [time.perf_counter()]
        async with self._open("POST", "/v1/chat/completions", body) as response:
            async for line in response.content:
                # The first event only opens the answer; it carries no token.
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                    times.append(time.perf_counter())
        if len(times) < 2:
            raise RequestError(f"POST {self._url}/v1/chat/completions streamed no tokens (log: {self._log_path})")
        return StreamTimes(ttft_s=times[1] - times[0], gaps_s=tuple(b - a for a, b in itertools.pairwise(times[1:])))

    async def next_token_logprobs(self, token_ids: Sequence[int], *, count: int = 2) -> dict[int, float]:
        """Log-probabilities of the `count` best next tokens after `token_ids`, by token id. Raises `RequestError`."""
        body = {
            "model": MODEL,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": count,
            "return_tokens_as_token_ids": True,
        }
        reply = await self.call("POST", "/v1/completions", body)
        best = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(token.removeprefix(_TOKEN_PREFIX)): value for token, value in best.items()}

    async def status(self, *, fresh: bool = False) -> dict[str, Any]:
        """The server's own account of itself: versions, counters, learning.

        The server renews it about once a second while it generates; `fresh` waits for one written after this call, so that
        counters hold everything answered so far. Raises `RequestError`, also when it is not renewed in time.
        """
        asked = time.time()
        ends = time.monotonic() + _FRESH_WAIT_S
        while True:
            status = await self.call("GET", "/specdraft/status")
            if not fresh or status["unix_time_s"] >= asked:
                return status
            if time.monotonic() >= ends:
                raise RequestError(f"the status was not renewed for {_FRESH_WAIT_S:.0f} s (log: {self._log_path})")
            await asyncio.sleep(_FRESH_POLL_S)

    async def train(self, action: str) -> dict[str, Any]:
        """``pause`` or ``resume`` learning; returns the status."""
        return await self.call("POST", "/specdraft/train", {"action": action})

    async def speculate(self, tokens: int | None) -> dict[str, Any]:
        """Draft so many tokens in every step; None lets the governor decide. Returns the governor's report."""
        return await self.call("POST", "/specdraft/speculate", {"tokens": tokens})

    async def publish(self, draft: Path) -> dict[str, Any]:
        """Serve the draft checkpoint in `draft` from now on; returns the publish record."""
        return await self.call("POST", "/specdraft/publish", {"draft": str(draft.resolve())})

    async def taps(self, enabled: bool) -> dict[str, Any]:
        """Tap requests that start from now on, or do not; returns the status."""
        return await self.call("POST", "/specdraft/taps", {"enabled": enabled})

    async def save(self, directory: Path) -> dict[str, Any]:
        """Write the served draft as a checkpoint into `directory`, a path on the server's machine."""
        return await self.call("POST", "/specdraft/save", {"directory": str(directory.resolve())})

    async def decode_time(self) -> DecodeTime | None:
        """Decode time of all requests finished so far, from the server's metrics; None when it keeps none."""
        text = await self._text("GET", "/metrics")
        seconds, requests = metric_total(text, _DECODE_TIME + "_sum"), metric_total(text, _DECODE_TIME + "_count")
        if seconds is None or requests is None:
            return None
        return DecodeTime(requests=requests, seconds=seconds)

    async def generated_tokens(self) -> float:
        """Tokens of answers since the server's start, from its metrics. Raises `RequestError` when it keeps none."""
        return await self._metric(_GENERATED)

    async def first_tokens(self) -> float:
        """Requests since the server's start that got a first token, from its metrics. Raises `RequestError` when it keeps none."""
        return await self._metric(_FIRST_TOKENS)

    async def _metric(self, name: str) -> float:
        total = metric_total(await self._text("GET", "/metrics"), name)
        if total is None:
            raise RequestError(f"GET {self._url}/metrics has no {name}: is this a vLLM server with its statistics on?")
        return total

    async def call(self, method: str, path: str, body: dict | None = None) -> dict[str, Any]:
        """Any route that answers with JSON. Raises `RequestError`."""
        text = await self._text(method, path, body)
        try:
            return json.loads(text)
        except ValueError:
            raise RequestError(f"{method} {self._url}{path} did not return JSON: {text[:200]!r}") from None

    async def _text(self, method: str, path: str, body: dict | None = None) -> str:
        async with self._open(method, path, body) as response:
            return await response.text()

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: dict | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("use the client inside `async with`")
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                if response.status >= 400:
                    text = await response.text()
                    raise RequestError(f"{method} {path} failed with {response.status}: {text[:500]} (log: {self._log_path})")
                yield response
        except TimeoutError:
            raise RequestError(f"{method} {path}: no answer within {self._timeout_s:.0f} s (log: {self._log_path})") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"{method} {path}: the server does not answer, {reason} (log: {self._log_path})") from error


def _chat_body(question: str, sampling: Sampling, salt: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "return_token_ids": True,
    }
    if sampling.ignore_end:
        body["ignore_eos"] = True
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if salt is not None:
        body["cache_salt"] = salt
    return body
