"""HTTP routes and Prometheus metrics of the plugin, and the task that publishes a ready candidate.

The routes that change something go through the engine core, so a swap happens between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm_specdraft import metrics, status
from vllm_specdraft.config import EngineConfig

logger = logging.getLogger(__name__)

POLL_S = 0.5
router = APIRouter(prefix="/specdraft", tags=["specdraft"])


class SpecdraftEndpoints:
    """vLLM endpoint plugin (``vllm.endpoint_plugins``)."""

    name = "specdraft"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, when this server was started with the plugin's config."""
        if EngineConfig.from_environment() is not None:
            app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the publisher and register the metrics."""
        config = EngineConfig.from_environment()
        if config is None or engine_client is None:
            return
        state.specdraft = Link(engine_client, Path(config.state_dir))
        metrics.register(Path(config.state_dir))
        if config.auto_publish:
            # The reference keeps the task alive.
            state.specdraft_publisher = asyncio.create_task(publish_when_ready(state.specdraft))


class Link:
    """The API server's way to the workers."""

    def __init__(self, engine_client: Any, state_dir: Path) -> None:
        self._client, self._state_dir = engine_client, state_dir
        self._swapping = asyncio.Lock()

    def read_status(self) -> dict[str, Any] | None:
        """What the worker wrote last."""
        return status.read(self._state_dir)

    async def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Swap a draft in between two steps; the publish record."""
        async with self._swapping:
            return await self._client.engine_core.call_utility_async("specdraft_swap", request)

    async def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one action on the workers; the first worker's status."""
        return (await self._client.collective_rpc("specdraft_control", args=(request,)))[0]


async def publish_when_ready(link: Link) -> None:
    """Publish each candidate that passed the gate. Ends with the server."""
    while True:
        await asyncio.sleep(POLL_S)
        try:
            found = link.read_status()
            if not found or not (digest := found["learning"]["candidate_digest"]):
                continue
            record = await link.swap({"candidate": digest})
            logger.info(
                "draft %d serves: expected accepted length %s -> %s on held-out samples, swapped in %s ms",
                record["draft_version"], record["held_out_before"], record["held_out_after"], record["swap_ms"],
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - whatever the engine raised: it serves the old draft, and we say so
            logger.error("publishing a draft failed, the old one serves on: %s", error)
            await asyncio.sleep(10)


@router.get("/status")
async def get_status(raw: Request) -> JSONResponse:
    """Versions, acceptance, idle state, learning, publishes, last error."""
    found = raw.app.state.specdraft.read_status()
    if found is None:
        return JSONResponse({"error": "the engine has not reported yet"}, status_code=503)
    return JSONResponse(found)


@router.post("/train")
async def post_train(raw: Request) -> JSONResponse:
    """``{"action": "pause" | "resume"}``."""
    body = await _body(raw)
    if body.get("action") not in ("pause", "resume"):
        return JSONResponse({"error": 'needs {"action": "pause"} or {"action": "resume"}'}, status_code=400)
    return JSONResponse(await raw.app.state.specdraft.control({"action": body["action"]}))


@router.post("/publish")
async def post_publish(raw: Request) -> JSONResponse:
    """``{}``: the learner's draft as it is now; ``{"draft": DIR}``: a checkpoint of the server's host."""
    body = await _body(raw)
    if unknown := body.keys() - {"draft"}:
        return JSONResponse({"error": f"unknown keys {sorted(unknown)}, known: draft"}, status_code=400)
    try:
        return JSONResponse(await raw.app.state.specdraft.swap(body))
    except Exception as error:  # noqa: BLE001 - the worker's error reaches the caller; the engine serves on
        return JSONResponse({"error": str(error)}, status_code=409)


@router.post("/save")
async def post_save(raw: Request) -> JSONResponse:
    """``{"directory": DIR}``: write the served draft as a checkpoint on the server's host."""
    body = await _body(raw)
    if not body.get("directory"):
        return JSONResponse({"error": 'needs {"directory": DIR}'}, status_code=400)
    try:
        return JSONResponse(await raw.app.state.specdraft.control({"action": "save", "directory": body["directory"]}))
    except Exception as error:  # noqa: BLE001 - see post_publish
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
