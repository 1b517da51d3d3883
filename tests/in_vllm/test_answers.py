"""Catches an answer of the real server that does not say, or says wrongly, which draft and policy its tokens came from: full and
streamed, over every route that gives answers, and across swaps in the middle of it; and an answer given too early.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.in_vllm import engines
from vllm_specdraft.launch import Server

COMPLETIONS, CHAT, RESPONSES, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"
ROUTES = (COMPLETIONS, CHAT, RESPONSES, GENERATE)
ASKED = {"X-Specdraft-Spans": "1"}
OPTIONS = ["--no-learn", "--no-auto-publish", "--kv-gib", "1", "--max-model-len", "2048", "--enable-scale-out", "--no-sync"]


@pytest.fixture(scope="module")
def server(target: Path, first_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that swaps only when a test says so, with every route that answers."""
    log = tmp_path_factory.mktemp("answers") / "server.log"
    with Server(target, draft=first_draft, log_path=log, extra=OPTIONS) as started:
        yield started


def body_of(path: str, *, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request of exactly `tokens` output tokens."""
    sampling = {"temperature": 0, "ignore_eos": True}
    if path == GENERATE:
        return {"token_ids": [5, 8, 13, 21, 34], "sampling_params": {**sampling, "max_tokens": tokens}, **more}
    if path == RESPONSES:
        # This route knows no `ignore_eos`.
        return {"model": "specdraft", "input": "Write about the sea.", "temperature": 0, "max_output_tokens": tokens, **more}
    body = {"model": "specdraft", **sampling, "max_tokens": tokens, **more}
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": "Write about the sea."}], "return_token_ids": True}
    return {"prompt": "1, 2, 3, 4,", **body, "return_token_ids": True}


def ask(server: Server, path: str, body: dict[str, Any], *, spans: bool = True) -> requests.Response:
    answer = requests.post(server.url + path, json=body, headers=ASKED if spans else {}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def chunks_of(answer: requests.Response) -> list[dict[str, Any]]:
    """The data of a stream's events without ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def versions_of(answer: requests.Response) -> tuple[list[int], list[int]]:
    """Policy and draft versions by the headers."""
    names = ("X-Specdraft-Policy-Version", "X-Specdraft-Draft-Version")
    policies, drafts = ([int(number) for number in answer.headers[name].split(", ")] for name in names)
    return policies, drafts


def publish(server: Server, draft: Path) -> int:
    """Swap the draft in once more; its version."""
    record = engines.post(server.url, "publish", {"draft": str(draft)})
    record.raise_for_status()
    return record.json()["draft_version"]


def served(server: Server) -> int:
    return engines.status(server.url)["draft_version"]


def check_spans(spans: Sequence[dict[str, Any]], tokens: int) -> list[int]:
    """All tokens are covered, in order, without a gap, by neighbours that differ; the draft versions in their order."""
    assert spans[0]["start"] == 0 and spans[-1]["end"] == tokens
    for before, after in itertools.pairwise(spans):
        assert before["end"] == after["start"]
        assert before["draft_version"] != after["draft_version"]
    assert all(span.keys() == {"policy_version", "draft_version", "start", "end"} for span in spans)
    assert all(span["start"] < span["end"] and span["policy_version"] == 0 for span in spans)
    return [span["draft_version"] for span in spans]


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_says_what_it_came_from_from_the_start_on(server: Server, path: str) -> None:
    version = served(server)
    plain = ask(server, path, body_of(path, tokens=24), spans=False)
    assert versions_of(plain) == ([0], [version])
    assert "specdraft" not in plain.json()
    answer = ask(server, path, body_of(path, tokens=24))
    assert versions_of(answer) == ([0], [version])
    (spans,) = answer.json()["specdraft"]["spans"]
    tokens = answer.json()["usage"]["output_tokens"] if path == RESPONSES else 24
    assert check_spans(spans, tokens) == [version]
    if path in (CHAT, COMPLETIONS):
        assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("path", ROUTES)
def test_so_does_a_stream(server: Server, path: str) -> None:
    version = served(server)
    for asked in (False, True):
        answer = ask(server, path, body_of(path, tokens=24, stream=True), spans=asked)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert versions_of(answer) == ([0], [version])
        *chunks, last = chunks_of(answer)
        assert not any("specdraft" in chunk for chunk in chunks)
        if not asked:
            assert "specdraft" not in last
            continue
        (spans,) = last["specdraft"]["spans"]
        tokens = last["response"]["usage"]["output_tokens"] if path == RESPONSES else 24
        assert check_spans(spans, tokens) == [version]
        if path != RESPONSES:
            assert last["choices"] == []
            assert answer.text.endswith("}\n\ndata: [DONE]\n\n")
            for name in ("id", "model", "object", "created", "request_id"):
                assert last.get(name) == chunks[0].get(name)


def test_a_client_library_reads_both(server: Server) -> None:
    """The extra chunk and the extra key are no stumbling block for typed clients."""
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", default_headers=ASKED)
    messages = [{"role": "user", "content": "Write about the sea."}]
    full = client.chat.completions.create(model="specdraft", messages=messages, max_tokens=8)
    assert full.specdraft["spans"][0][0]["start"] == 0
    *_, last = client.chat.completions.create(model="specdraft", messages=messages, max_tokens=8, stream=True)
    assert last.choices == [] and last.specdraft["spans"]
    *_, last = client.completions.create(model="specdraft", prompt="1, 2,", max_tokens=8, stream=True)
    assert last.choices == [] and last.specdraft["spans"]
    *_, last = client.responses.create(model="specdraft", input="Write.", max_output_tokens=8, stream=True)
    assert last.type in ("response.completed", "response.incomplete") and last.specdraft["spans"]


def test_several_prompts_and_completions_are_told_apart(server: Server) -> None:
    """Of different lengths, which only the right order shows."""
    version = served(server)
    body = body_of(COMPLETIONS, tokens=64, prompt=["1, 2, 3, 4,", "The sea is"], n=2, temperature=1.0, seed=5, stop=[" the", "3"])
    for stream in (False, True):
        answer = ask(server, COMPLETIONS, {**body, "stream": stream})
        if stream:
            *chunks, last = chunks_of(answer)
            lengths = [0] * 4
            for chunk in chunks:
                for choice in chunk["choices"]:
                    lengths[choice["index"]] += len(choice["token_ids"])
            spans = last["specdraft"]["spans"]
        else:
            lengths = [len(choice["token_ids"]) for choice in answer.json()["choices"]]
            spans = answer.json()["specdraft"]["spans"]
        assert len(set(lengths)) > 1, "or the order would not show"
        assert len(spans) == len(lengths) == 4
        for completion, length in zip(spans, lengths, strict=True):
            assert check_spans(completion, length) == [version]


def swap_while(server: Server, draft: Path, asking: threading.Thread, *, times: int) -> list[int]:
    """Swap `times` while the answer grows; the versions."""
    versions = []
    for _ in range(times):
        start = engines.status(server.url)["counters"]["generated_tokens"]
        while engines.status(server.url)["counters"]["generated_tokens"] < start + 20:
            assert asking.is_alive(), "the answer ended before the swap"
            time.sleep(0.02)
        versions.append(publish(server, draft))
        assert asking.is_alive(), "the swap came after the answer"
    return versions


@pytest.mark.parametrize(("path", "stream"), [(COMPLETIONS, False), (CHAT, True), (GENERATE, False), (GENERATE, True)])
def test_an_answer_that_went_over_swaps_says_where(server: Server, first_draft: Path, path: str, stream: bool) -> None:
    """C9. The swapped draft is the same one: the tokens must not differ either."""
    before = served(server)
    body = body_of(path, tokens=180, stream=stream)
    found: list[requests.Response] = []
    asking = threading.Thread(target=lambda: found.append(ask(server, path, body)), daemon=True)
    asking.start()
    versions = [before, *swap_while(server, first_draft, asking, times=2)]
    asking.join(timeout=120)
    (answer,) = found
    if stream:
        *chunks, last = chunks_of(answer)
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
        assert versions_of(answer) == ([0], [before]), "what was served when it began"
    else:
        last = answer.json()
        tokens = last["choices"][0]["token_ids"]
        assert versions_of(answer) == ([0], versions)
    (spans,) = last["specdraft"]["spans"]
    assert check_spans(spans, 180) == versions
    # At least as many came between two swaps as were waited for, and the last ones after the last swap.
    assert all(span["end"] - span["start"] >= 16 for span in spans[:-1])
    again = ask(server, path, body_of(path, tokens=180))
    assert again.json()["choices"][0]["token_ids"] == tokens
    assert versions_of(again) == ([0], versions[-1:])


def test_answers_made_at_the_same_time_as_swaps_all_add_up(server: Server, first_draft: Path) -> None:
    """Many at once, streamed and full, of different lengths, while drafts come and go: none without a version, none of a version
    that was not served meanwhile, and the engine goes on."""
    before = served(server)
    lengths = [8 + 11 * i for i in range(12)]

    def run(number: int) -> tuple[int, list[dict[str, Any]], tuple[list[int], list[int]]]:
        stream = number % 2 == 0
        body = body_of(COMPLETIONS, tokens=lengths[number], stream=stream, prompt=f"{number}, {number + 1},")
        answer = ask(server, COMPLETIONS, body)
        last = chunks_of(answer)[-1] if stream else answer.json()
        (spans,) = last["specdraft"]["spans"]
        return number, spans, versions_of(answer)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(run, number) for number in range(len(lengths))]
        after = before
        while not all(answer.done() for answer in answers):
            after = publish(server, first_draft)
    seen = set()
    for answer in answers:
        number, spans, (_, named) = answer.result()
        drafts = check_spans(spans, lengths[number])
        assert drafts == sorted(drafts)
        assert named == drafts if number % 2 else before <= named[0] <= drafts[0] + 1
        seen |= set(drafts)
    assert len(seen) > 2 and min(seen) >= before and max(seen) <= after


def test_errors_and_other_routes_say_nothing(server: Server) -> None:
    refused = requests.post(f"{server.url}{COMPLETIONS}", json={"model": "no such", "prompt": "1"}, headers=ASKED, timeout=60)
    assert refused.status_code == 404
    malformed = requests.post(f"{server.url}{CHAT}", json={"messages": 5}, headers=ASKED, timeout=60)
    assert malformed.status_code == 400
    others = [requests.get(f"{server.url}{path}", headers=ASKED, timeout=60) for path in ("/v1/models", "/health", "/metrics")]
    tokenized = requests.post(f"{server.url}/tokenize", json={"model": "specdraft", "prompt": "1"}, headers=ASKED, timeout=60)
    for answer in (refused, malformed, tokenized, *others):
        assert not any("specdraft" in name.lower() for name in answer.headers)


def test_a_client_that_hangs_up_leaves_nothing_running(server: Server) -> None:
    def running() -> float:
        lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))

    body = body_of(CHAT, tokens=1500, stream=True)
    with requests.post(server.url + CHAT, json=body, headers=ASKED, stream=True, timeout=60) as answer:
        assert next(answer.iter_content(16))
    deadline = time.monotonic() + 10
    while running() > 0:
        assert time.monotonic() < deadline, "it is still being answered"
        time.sleep(0.2)


def test_no_answers_before_the_wanted_policy(target: Path, first_draft: Path, tmp_path: Path) -> None:
    """C13: closed for answers, open for all that would bring the version or look after the server."""
    extra = [*OPTIONS, "--min-policy-version", "1"]
    with Server(target, draft=first_draft, log_path=tmp_path / "server.log", extra=extra) as waiting:
        for path in ROUTES:
            refused = requests.post(waiting.url + path, json=body_of(path, tokens=4), timeout=60)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "1"
            assert "policy version 0" in refused.json()["error"]["message"]
        for path in ("/health", "/metrics", "/specdraft/status", "/v1/models"):
            assert requests.get(waiting.url + path, timeout=60).status_code == 200
        assert publish(waiting, first_draft) == 1
        assert requests.post(f"{waiting.url}/tokenize", json={"model": "specdraft", "prompt": "1"}, timeout=60).status_code == 200
