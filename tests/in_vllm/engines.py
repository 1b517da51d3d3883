"""Talking to the servers under test."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each and gives 9 pencils away. How many pencils are left?",
    "A train travels 60 miles in one hour. How far does it travel in three and a half hours?",
    "Write two sentences about the sea.",
    "Maria buys 4 apples for 2 dollars each and pays with a 20 dollar bill. How much change does she get?",
)


def chat(url: str, question: str, **options: Any) -> list[int]:
    """Token ids of one greedy answer (other sampling by `options`)."""
    body = {
        "model": "specdraft",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 96,
        "return_token_ids": True,
        **options,
    }
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def chat_many(url: str, questions: list[str], **options: Any) -> list[list[int]]:
    """Answers to several questions at once, in their order."""
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(lambda question: chat(url, question, **options), questions))


def complete(url: str, prompt: list[int], **options: Any) -> requests.Response:
    """A greedy answer of 24 tokens to token ids, unless the options say otherwise."""
    body = {
        "model": "specdraft",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = requests.post(f"{url}/v1/completions", json={**body, **options}, timeout=120)
    answer.raise_for_status()
    return answer


def tokens(url: str, prompt: list[int], **options: Any) -> list[int]:
    """The token ids of the same."""
    return complete(url, prompt, **options).json()["choices"][0]["token_ids"]


def status(url: str) -> dict[str, Any]:
    """A status written after this call began."""
    asked = time.time()
    deadline = time.monotonic() + 10
    while True:
        found = requests.get(f"{url}/specdraft/status", timeout=10).json()
        if found["unix_time_s"] >= asked or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def post(url: str, route: str, body: dict[str, Any]) -> requests.Response:
    """POST to one of our routes."""
    return requests.post(f"{url}/specdraft/{route}", json=body, timeout=120)


def acceptance(url: str, question: str) -> tuple[float, float]:
    """Draft tokens verified and accepted during one greedy answer, by vLLM's own counters."""

    def read() -> tuple[float, float]:
        lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()

        def total(name: str) -> float:
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total"))

        return total("num_draft_tokens"), total("num_accepted_tokens")

    before = read()
    chat(url, question)
    time.sleep(0.5)
    after = read()
    return after[0] - before[0], after[1] - before[1]


class InBackground(threading.Thread):
    """One request in a thread of its own."""

    def __init__(self, url: str, question: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self._arguments, self._options = (url, question), options
        self.tokens: list[int] | None = None
        self.start()

    def run(self) -> None:
        self.tokens = chat(*self._arguments, **self._options)
