"""``specdraft status``: fetch a server's status and show it, once or again and again. Imports neither torch nor vLLM."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from vllm_specdraft.config import SettingsError
from vllm_specdraft.console import Console

TIMEOUT_S = 10.0


class NoStatusError(Exception):
    """No status came back this time; it may the next time."""


def url_of(address: str) -> str:
    """Where the status of the server at `address` is. Raises `SettingsError` for what no server can be at."""
    url = f"{address.rstrip('/')}/specdraft/status"
    try:
        parts = urlsplit(url)
        # Reading the port checks it.
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"no status at {url}: needs the address of a specdraft server, http://HOST:PORT")
    return url


def fetch(url: str) -> dict[str, Any]:
    """The status. Raises `NoStatusError` with the reason."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise NoStatusError(f"{url} answered {error.code}: {_reason(error)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoStatusError(f"no answer from {url}: {getattr(error, 'reason', None) or error}") from None
    except ValueError:
        raise NoStatusError(f"no status at {url} (no JSON): needs the address of a specdraft server") from None
    if not isinstance(found, dict) or "draft_version" not in found:
        raise NoStatusError(f"no status at {url}: is this a specdraft server?")
    return found


def post(url: str, body: dict[str, Any], *, key: str | None, timeout_s: float = 600.0) -> dict[str, Any]:
    """What a route answers to a change that is asked of it. Raises `SettingsError` with its reason when it refuses."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SettingsError(f"the server refused ({error.code}): {_reason(error)}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SettingsError(f"no answer from {url}: {getattr(error, 'reason', None) or error}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return "is this a specdraft server?"


def lines_of(found: dict[str, Any]) -> list[str]:
    """A status in words, one line for each thing."""
    learning, replay = found["learning"], found["replay"]
    length = found["accepted_length"]
    rollbacks = found.get("rollbacks", 0)
    shown = {
        "policy": f"v{found['policy_version']}" + _previous(found),
        "draft": f"v{found['draft_version']} ({found['draft_type']}, {found['draft_digest'][:12]})" + _behind(found),
        "accepted length": "-" if length is None else f"{length:.2f} tokens per step",
        "speculation": _speculation(found.get("governor")),
        "window": found["idle_state"] + (" (learning paused)" if learning["paused"] else ""),
        "learned": f"{learning['seconds']:.1f} s, {learning['tokens']} tokens, {learning['steps']} steps",
        "held out": f"served {_number(learning['held_out_served'])}, in training {_number(learning['held_out_candidate'])}",
        "waiting for": learning.get("waiting_for") or "nothing",
        "replay": f"{replay['samples']} + {replay['held_out_samples']} held out, {replay['bytes'] / 1e6:.0f} MB",
        "weights at": _sync(found),
        "publishes": str(len(found["publishes"])) + (f", {rollbacks} taken back" if rollbacks else ""),
        "last error": found["last_error"] or "none",
    }
    return [f"{key:16} {value}" for key, value in shown.items()]


def line_of(found: dict[str, Any]) -> str:
    """A status in one line, for a log."""
    learning, length = found["learning"], found["accepted_length"]
    return (
        f"policy v{found['policy_version']}  draft v{found['draft_version']}  "
        f"accepted {_number(length)}  {found['idle_state']}{' paused' if learning['paused'] else ''}  "
        f"learned {learning['seconds']:.0f} s, {learning['tokens']} tokens  "
        f"held out {_number(learning['held_out_served'])} -> {_number(learning['held_out_candidate'])}  "
        f"error: {found['last_error'] or 'none'}"
    )


def _speculation(governor: dict[str, Any] | None) -> str:
    """What the governor decided, and the numbers it compared: time per token against steps without drafts."""
    if governor is None:
        return "in every step (no governor)"
    if governor.get("fixed") is not None:
        return f"{governor['fixed']} tokens, fixed by hand"
    if not governor.get("batches"):
        return "nothing measured yet"
    alarm = "ACCEPTANCE COLLAPSED; " if governor["acceptance_collapsed"] else ""
    return alarm + "; ".join(f"batch {batch}: {_decision(found)}" for batch, found in governor["batches"].items())


def _decision(found: dict[str, Any]) -> str:
    others = ", ".join(
        f"{tokens}: {one['time_per_token']:.2f}" for tokens, one in found["compared"].items() if one["known"] and tokens != "0"
    )
    return ("off" if found["chosen"] == "0" else found["chosen"]) + (f" ({others})" if others else "")


def _previous(found: dict[str, Any]) -> str:
    previous = found.get("previous_policy_version")
    return "" if previous is None else f" (v{previous} is kept for a rollback)"


def _behind(found: dict[str, Any]) -> str:
    return f", BEHIND: made for policy v{found['draft_policy_version']}" if found.get("draft_is_behind") else ""


def _sync(found: dict[str, Any]) -> str:
    sync = found.get("sync")
    if sync is None:
        return "nowhere (--no-sync)"
    if sync["endpoint"] is None:
        return f"nowhere at present: {sync['error'] or 'the receiver starts'}"
    counters = sync["counters"]
    done = ", ".join(f"{counters[key]} {key}" for key in ("committed", "aborted", "refused") if counters.get(key))
    return f"{sync['endpoint']} ({'encrypted, ' if sync['encrypted'] else ''}{done or 'no update yet'})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def watch(
    url: str,
    *,
    every_s: float,
    console: Console,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the status every `every_s` seconds until the caller is interrupted, whether the server is there or not.

    On a terminal the lines are redrawn in place; elsewhere each refresh is one line.
    """
    gone_since: str | None = None
    while True:
        now = time.strftime("%H:%M:%S")
        try:
            found = fetch(url)
            gone_since = None
            if as_json:
                console.line(json.dumps(found))
            elif console.live:
                console.block([f"{url}  {now}", *lines_of(found)])
            else:
                console.line(f"{now}  {line_of(found)}")
        except NoStatusError as error:
            gone_since = gone_since or now
            text = f"{error} (since {gone_since}); trying again"
            if console.live and not as_json:
                console.block([f"{url}  {now}", text])
            else:
                console.line(json.dumps({"error": text}) if as_json else f"{now}  {text}")
        sleep(every_s)
