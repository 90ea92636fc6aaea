"""What happens around every request: the token, a line in the log, metrics, and the end of connections at shutdown."""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.server.logs import log
from vitral.server.requests import RequestError

if TYPE_CHECKING:
    from vitral.server.app import Service

_PUBLIC = ("/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # they tell nothing that needs a token


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service, paths: Mapping[Any, str]) -> None:
        """Wrap an application.

        Args:
            app: the application.
            service: its token, metrics, and whether it is shutting down.
            paths: of the routes, by endpoint: what metrics and logs call a request.
        """
        self.app, self.service, self.paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, number = time.monotonic(), 500, uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["id"] = number

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", number.encode())]
                if self.service.draining:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            if self._allowed(scope):
                await self.app(scope, receive, sent)
            else:
                refusal = RequestError(401, "the token is missing or wrong: send Authorization: Bearer TOKEN.")
                await refusal.response()(scope, receive, sent)
        except Exception:
            log("error", level="error", id=number, exc_info=True)  # the application has answered with 500
        finally:
            seconds = time.monotonic() - started
            path = self.paths.get(scope.get("endpoint"), "other")
            self.service.metrics.count_request(path, scope["method"], status, seconds)
            log(
                "request",
                id=number,
                method=scope["method"],
                path=path,
                status=status,
                seconds=round(seconds, 4),
                **{key: state[key] for key in ("model", "images") if key in state},
            )

    def _allowed(self, scope: Scope) -> bool:
        token = self.service.settings.token
        if not token or scope["path"] in _PUBLIC:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {token}".encode())
