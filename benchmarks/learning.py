"""Learning in the demo's rhythm until a budget of learning time is used up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import costs
from vllm_specdraft.demo.client import Client
from vllm_specdraft.demo.session import Session, SessionError


async def learn(
    session: Session,
    client: Client,
    *,
    budget_s: float,
    cap_s: float,
    on_round: Callable[[dict[str, Any]], None] = lambda status: None,
) -> None:
    """Rounds until the server has learned for `budget_s`, and never more idle time than `cap_s`; told the status after each.

    Raises `SessionError` when a whole pause passes without learning.
    """
    rhythm, before_s = session.rhythm, session.idle_s

    def enough(status: dict[str, Any]) -> bool:
        return status["learning"]["seconds"] >= budget_s

    await costs.fill_kv_cache(
        client, session.prompts, tokens=session.kv_gib * costs.KV_TOKENS_PER_GIB, progress=session.console.progress
    )
    index, learned_s = 0, 0.0
    while learned_s < budget_s and session.idle_s - before_s < cap_s:
        index += 1
        await session.play_burst(client, index=index)
        left_s = cap_s - (session.idle_s - before_s)
        session.rhythm = replace(rhythm, pause_s=min(rhythm.pause_s, left_s))
        status = await session.play_pause(client, enough=enough)
        if status["learning"]["seconds"] <= learned_s:
            raise SessionError(
                f"the draft learned nothing in a whole pause: {status['idle_state']}, {status['replay']['samples']} samples, "
                f"last error {status['last_error']} (logs in {session.record.directory})"
            )
        learned_s = status["learning"]["seconds"]
        on_round(status)
    session.rhythm = rhythm
