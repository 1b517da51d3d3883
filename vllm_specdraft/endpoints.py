"""HTTP routes and Prometheus metrics of the plugin, and the task that publishes a ready candidate.

The routes that change something go through the engine core, so a swap happens between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from vllm.v1.engine.exceptions import EngineDeadError

from trainer_bridge.draft import checkpoint
from vllm_specdraft import learner_state, metrics, security
from vllm_specdraft.admission import Admission
from vllm_specdraft.answers import Answers
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.link import Link
from vllm_specdraft.sync_link import SyncLink
from vllm_specdraft.versions import version_label

logger = logging.getLogger(__name__)

POLL_S = 0.5
router = APIRouter(prefix="/specdraft", tags=["specdraft"])


class SpecdraftEndpoints:
    """vLLM endpoint plugin (``vllm.endpoint_plugins``)."""

    name = "specdraft"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and what stands in front of all routes, when this server was started with the plugin's config."""
        if (config := EngineConfig.from_environment()) is None:
            return
        app.include_router(router)
        # The last one is the outermost.
        app.add_middleware(Answers)
        app.add_middleware(Admission, min_policy_version=config.min_policy_version)
        if security.GUARD not in app.state.args.middleware:
            # `specdraft serve` names it to vLLM, which puts it outermost; whoever starts vLLM another way has it all the same.
            app.add_middleware(security.Guard)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Name the versions served, start the publisher and register the metrics."""
        config = EngineConfig.from_environment()
        if config is None or engine_client is None:
            return
        state.specdraft = link = Link(
            engine_client,
            Path(config.state_dir),
            policy_version=config.policy_version,
            draft_version=int(checkpoint.read_config(Path(config.draft_dir)).get(learner_state.VERSION_KEY, 0)),
        )
        label = version_label(link.policy_version, link.draft_version)
        await engine_client.engine_core.set_weight_version_async(label)
        if config.sync_bind is not None:
            link.sync = SyncLink(_sync_settings(config, link, args), commit=link.commit, sample=link.sample)
            state.specdraft_sync = asyncio.create_task(link.sync.run())
        metrics.register(Path(config.state_dir), link.sync_counters)
        # The reference keeps the task alive.
        state.specdraft_publisher = asyncio.create_task(follow(link, publish=config.auto_publish))


def _sync_settings(config: EngineConfig, link: Link, args: Namespace) -> dict[str, Any]:
    """What the receiver's process is told."""
    return {
        "target": args.model,
        "draft": config.draft_dir,
        "bind": config.sync_bind,
        "keys": config.sync_keys,
        "insecure": config.sync_insecure,
        "job": Path(config.state_dir).name,
        "policy_version": link.policy_version,
        "draft_version": link.draft_version,
    }


async def follow(link: Link, *, publish: bool) -> None:
    """Know what the engine serves, publish each candidate that passed the gate, and take back a draft that failed its probation.

    Ends with the server.
    """
    while True:
        await asyncio.sleep(POLL_S)
        try:
            found = link.read_status()
            link.follow(found)
            if not publish or (request := _due(found)) is None:
                continue
            record = await link.swap(request)
            logger.info(
                "draft %d serves (%s): expected accepted length %s -> %s on held-out samples, swapped in %s ms",
                record["draft_version"], record["origin"], record["held_out_before"], record["held_out_after"],
                record["swap_ms"],
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - whatever the engine raised: it serves the old draft, and we say so
            logger.error("swapping the draft failed, the old one serves on: %s", error)
            await asyncio.sleep(10)


def _due(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The swap that a status asks for, if any."""
    if not found:
        return None
    if (version := found["rollback_wanted"]) is not None:
        return {"rollback": version}
    digest = found["learning"]["candidate_digest"]
    return {"candidate": digest} if digest else None


@router.get("/status")
async def get_status(raw: Request) -> JSONResponse:
    """Versions, acceptance, idle state, learning, publishes, last error."""
    found = raw.app.state.specdraft.read_status()
    if found is None:
        return JSONResponse({"error": "the engine has not reported yet"}, status_code=503)
    return JSONResponse(found)


@router.post("/train")
async def post_train(raw: Request) -> JSONResponse:
    """``{"action": "pause" | "resume"}``: stop or go on learning."""
    action = (await _body(raw)).get("action")
    if action not in ("pause", "resume"):
        return _refused('needs {"action": "pause"} or {"action": "resume"}')
    return await _answer(_link(raw).control({"action": action}))


@router.post("/taps")
async def post_taps(raw: Request) -> JSONResponse:
    """``{"enabled": true | false}``: whether requests that start from now on are tapped."""
    enabled = (await _body(raw)).get("enabled")
    if not isinstance(enabled, bool):
        return _refused('needs {"enabled": true} or {"enabled": false}')
    return await _answer(_link(raw).control({"action": "taps_on" if enabled else "taps_off"}))


@router.post("/speculate")
async def post_speculate(raw: Request) -> JSONResponse:
    """``{"tokens": N}``: draft N tokens in every step, 0 for none; ``{"tokens": null}``: let the governor decide again."""
    body = await _body(raw)
    tokens = body.get("tokens")
    if body.keys() != {"tokens"} or not (tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool))):
        return _refused('needs {"tokens": N}, or {"tokens": null} to let the governor decide')
    return await _answer(_link(raw).govern(body))


@router.post("/publish")
async def post_publish(raw: Request) -> JSONResponse:
    """``{}``: the learner's draft as it is now; ``{"draft": DIR}``: a checkpoint of the server's host."""
    body = await _body(raw)
    if unknown := body.keys() - {"draft"}:
        return _refused(f"unknown keys {sorted(unknown)}, known: draft")
    if "draft" in body and (not body["draft"] or not isinstance(body["draft"], str)):
        return _refused('"draft" must name a directory; leave it out to publish the draft in training')
    return await _answer(_link(raw).swap(body))


@router.post("/rollback")
async def post_rollback(raw: Request) -> JSONResponse:
    """``{}``: serve the last draft before the served one that saw traffic again; ``{"policy": true}``: target and draft before
    the last update."""
    body = await _body(raw)
    if body not in ({}, {"policy": True}, {"policy": False}):
        return _refused('needs nothing (the draft), or {"policy": true} (the update)')
    link = _link(raw)
    return await _answer(link.roll_back() if body.get("policy") else link.swap({"rollback": None}))


@router.post("/abort")
async def post_abort(raw: Request) -> JSONResponse:
    """``{}``: drop an update that a client of vLLM's weight transfer began and never finished, so that the next one can begin."""
    if body := await _body(raw):
        return _refused(f"unknown keys {sorted(body)}, needs none")

    async def work() -> dict[str, Any]:
        await _link(raw).abort()
        return {"aborted": True}

    return await _answer(work())


@router.post("/save")
async def post_save(raw: Request) -> JSONResponse:
    """``{"directory": DIR}``: write the served draft as a checkpoint on the server's host."""
    directory = (await _body(raw)).get("directory")
    if not directory or not isinstance(directory, str):
        return _refused('needs {"directory": DIR}')
    return await _answer(_link(raw).control({"action": "save", "directory": directory}))


@router.post("/checkpoint")
async def post_checkpoint(raw: Request) -> JSONResponse:
    """``{}``: write the learner's state and the served draft into ``--checkpoint-dir`` now."""
    if body := await _body(raw):
        return _refused(f"unknown keys {sorted(body)}, needs none")
    return await _answer(_link(raw).control({"action": "checkpoint"}))


def _link(raw: Request) -> Link:
    return raw.app.state.specdraft


def _refused(reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=400)


async def _answer(work: Awaitable[dict[str, Any]]) -> JSONResponse:
    """What the engine answered; its error as a 409, for it serves on as before, or a 503, if it does not serve at all."""
    try:
        return JSONResponse(await work)
    except EngineDeadError as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    except Exception as error:  # noqa: BLE001 - the worker's error reaches the caller
        return JSONResponse({"error": str(error)}, status_code=409)


async def _body(raw: Request) -> dict[str, Any]:
    """The JSON object of a request; ``{}`` when it has no body. Raises a 415 or 400."""
    if not await raw.body():
        return {}
    if raw.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # What a web page may send to another origin without asking is not JSON by its type.
        raise HTTPException(415, "send the body as application/json")
    try:
        found = await raw.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return found
