"""Requests: bodies within limits, images and query parameters, errors as answers, and what happens around each."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.server.monitoring import log

if TYPE_CHECKING:
    from vitral.server.app import Service

_BODIES = 16  # bodies of the largest size that may be in memory at once
_PUBLIC = ("/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # they tell nothing that needs a token


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": str(self)}, self.status, headers)


class BodyReader:
    """Reads bodies into memory: not too large, not too slow, and not too many at once."""

    def __init__(self, max_body: int, timeout: float) -> None:
        self.max_body, self.timeout, self._held = max_body, timeout, 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body, for a block during which it counts as being in memory.

        Raises:
            RequestError: 408, 413, 415 or 429.
        """
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(415, "compressed bodies are not accepted: send the image file as it is.")
        length = request.headers.get("content-length", "0")
        if int(length if length.isdecimal() else 0) > self.max_body:
            raise self._too_large()
        chunks: list[bytes] = []
        try:
            await self._receive(request, chunks)
            yield b"".join(chunks)
        finally:
            self._held -= sum(map(len, chunks))

    async def _receive(self, request: Request, chunks: list[bytes]) -> None:
        size = 0
        try:
            async with asyncio.timeout(self.timeout):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._held += len(chunk)
                    chunks.append(chunk)
                    if size > self.max_body:
                        raise self._too_large()
                    if self._held > _BODIES * self.max_body:
                        raise RequestError(429, "too many bodies are being received: retry.", retry_after=1)
        except TimeoutError as error:
            raise RequestError(408, f"the body did not arrive within {self.timeout:g} seconds.") from error

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body has more than {self.max_body:,} bytes: send smaller or fewer images.")


def images_in(body: bytes, content_type: str) -> list[bytes]:
    """The images of a body: every part of a multipart form, whatever its name; else the body itself.

    Raises:
        RequestError: 400 for a damaged form, or one without parts.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        if not body:
            raise RequestError(400, "there is no image: send one as the body, or several as multipart/form-data.")
        return [body]
    boundary = options.get(b"boundary", b"")
    parts: list[bytearray] = []
    ended = False

    def begin() -> None:
        parts.append(bytearray())

    def data(chunk: bytes, start: int, end: int) -> None:
        parts[-1] += memoryview(chunk)[start:end]

    def finish() -> None:
        nonlocal ended
        ended = True

    try:
        if not 0 < len(boundary) <= 70:  # RFC 2046
            raise FormParserError("boundary")
        parser = MultipartParser(boundary, {"on_part_begin": begin, "on_part_data": data, "on_end": finish})
        parser.write(body)
        if not ended:
            raise FormParserError("end")
    except FormParserError as error:
        raise RequestError(400, "the multipart form is damaged: send it with a boundary and to its end.") from error
    if not parts:
        raise RequestError(400, "the multipart form has no parts: send at least one image.")
    return [bytes(part) for part in parts]


class Query:
    """Query parameters, checked."""

    def __init__(self, request: Request, allowed: Sequence[str]) -> None:
        self.values = dict(request.query_params)
        names = [name for name, _ in request.query_params.multi_items()]
        if unknown := [name for name in names if name not in allowed or names.count(name) > 1]:
            raise RequestError(400, f"unknown or repeated parameter {unknown[0][:40]!r}: use {', '.join(allowed)}.")

    def text(self, name: str) -> str:
        return self.values.get(name, "")

    def number(self, name: str, default: int, largest: int) -> int:
        """A whole number from 1 to `largest`."""
        text = self.values.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= largest):
            raise RequestError(400, f"{name}={text[:40]} is not a whole number from 1 to {largest}.")
        return int(text)

    def flag(self, name: str) -> bool:
        """1 or true, 0 or false."""
        text = self.values.get(name, "0").lower()
        if text not in ("0", "1", "true", "false"):
            raise RequestError(400, f"{name}={text[:40]} is neither 1 nor 0.")
        return text in ("1", "true")


async def until_gone(request: Request) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(authorization, f"Bearer {token}".encode())
