"""No answers before the wanted policy is served: for an engine that (re)joins a run with older weights than the run has.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

from vllm_specdraft import answers, security
from vllm_specdraft.answers import App, Receive, Scope, Send

ROUTES = answers.ROUTES | {"/cohere/v2/chat", "/generative_scoring", "/v1/systemone"}
"""All that make the policy say something."""


class Admission:
    """ASGI middleware: 503 for whoever asks for an answer while the served policy is below the wanted version.

    Everything else stays open: health, metrics, status, models, and the routes that bring the version.
    """

    def __init__(self, app: App, *, min_policy_version: int) -> None:
        self._app, self._minimum = app, min_policy_version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if self._minimum > 0 and answers.makes_answer(scope, ROUTES):
            served = getattr(getattr(scope["app"].state, "specdraft", None), "policy_version", 0)
            if served < self._minimum:
                message = (
                    f"policy version {served} is served here, and no answers are given before version {self._minimum} "
                    "(--min-policy-version): ask again when an update has brought it"
                )
                return await security.send_error(scope, send, 503, message)
        return await self._app(scope, receive, send)
