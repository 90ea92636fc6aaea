"""The HTTP application: `/predict`, `/models`, health, metrics and the page; `/v2` is in `open_inference`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vitral.data.images import ImageError, ImageTooLarge
from vitral.export.web import server_page
from vitral.server.models import (
    PendingResults,
    Prediction,
    QueueFull,
    ServedModel,
    Settings,
    decoding_pool,
    top_classes,
)
from vitral.server.monitoring import Metrics
from vitral.server.openapi import openapi
from vitral.server.requests import BodyReader, Guard, Query, RequestError, images_in, until_gone
from vitral.server.runtime import Runtime

Endpoint = Callable[["Service", Request], Coroutine[Any, Any, Response]]


class Service:
    """What the routes share: models, limits, and whether the server is shutting down."""

    def __init__(self, loaders: Mapping[str, Callable[[], Runtime]], settings: Settings) -> None:
        """Load the models.

        Args:
            loaders: by the name of each model, what loads it.
            settings: limits of requests, batches and queues.

        Raises:
            UserError: a model cannot be loaded.
        """
        self.settings, self.metrics = settings, Metrics(settings.metrics_dir)
        self.models = {name: ServedModel(name, load, settings, self.metrics) for name, load in loaders.items()}
        self.bodies = BodyReader(settings.max_body, settings.timeout)
        self.pool = decoding_pool()
        self.draining = False  # answers end their connections, and readiness is denied
        self.ready = True  # among several workers: all of them are
        self.reload: Callable[[ServedModel], Coroutine[Any, Any, None]] = _reload

    def model(self, name: str) -> ServedModel:
        """The model of that name; the first one if none is given."""
        if name and name not in self.models:
            raise RequestError(404, f"there is no model {name[:80]!r}: use one of {', '.join(self.models)}.")
        return self.models[name] if name else next(iter(self.models.values()))

    async def compute(
        self, request: Request, served: ServedModel, count: int, start: Callable[[], PendingResults]
    ) -> list[Any]:
        """Await what a model computes, in its queue's places and within the time limit, while the client is there."""
        most = self.settings.max_queue
        if count > most:
            raise RequestError(413, f"{count} images are more than the queue of {most} takes: send fewer at once.")
        try:
            with served.admitted(count):
                results = start()
                try:
                    return await self._awaited(request, results)
                finally:
                    served.finish(results)
        except QueueFull as error:
            raise RequestError(429, "the queue is full: retry later.", retry_after=1) from error

    async def _awaited(self, request: Request, results: PendingResults) -> list[Any]:
        late = RequestError(503, "the response was not ready in time: retry later.", retry_after=1)
        timer = asyncio.get_running_loop().call_later(self.settings.timeout, results.fail, late)
        gone = asyncio.ensure_future(until_gone(request))
        gone.add_done_callback(lambda _: results.fail(ClientDisconnect()))
        try:
            return await results.done
        finally:
            timer.cancel()
            gone.cancel()

    def check_ready(self) -> None:
        """Raise a RequestError if new requests are not welcome."""
        if self.draining:
            raise RequestError(503, "the server is shutting down.", retry_after=1)
        if not self.ready:
            raise RequestError(503, "not all workers are ready.", retry_after=1)

    def close(self) -> None:
        """Finish what is queued and end all threads."""
        for served in self.models.values():
            served.batcher.close()
        self.pool.shutdown()


async def _reload(served: ServedModel) -> None:
    await asyncio.to_thread(served.reload)


def build_app(service: Service) -> Guard:
    """The application of a service, behind its guard."""
    from vitral.server.open_inference import ROUTES as V2_ROUTES

    routes = [Route(path, _bound(service, endpoint), methods=[method]) for method, path, endpoint in ROUTES + V2_ROUTES]
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, ClientDisconnect, Exception), _failed),
    )
    return Guard(app, service, {route.endpoint: route.path for route in routes})


def _bound(service: Service, endpoint: Endpoint) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def call(request: Request) -> Response:
        return await endpoint(service, request)

    return call


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a request that raised."""
    if isinstance(error, RequestError):
        return error.response()
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for the log: nobody receives it
    return JSONResponse({"error": f"internal error: see the log for {request.state.id}."}, 500)


async def predict(service: Service, request: Request) -> Response:
    """`POST /predict`: the top classes of one image or several, and where the model looked."""
    query = Query(request, ("model", "top", "attention"))
    served, attention = service.model(query.text("model")), query.flag("attention")
    top = min(query.number("top", 5, 1_000_000), len(served.runtime.classes))
    if attention and not served.runtime.attention:
        raise RequestError(400, f"{served.name} has no attention between all patches: omit attention.")
    content_type = request.headers.get("content-type", "")
    async with service.bodies.body(request) as body:
        images = images_in(body, content_type)
        request.state.images, request.state.model = len(images), served.name
        results = await service.compute(
            request, served, len(images), lambda: served.predict(images, attention, service.pool)
        )
    classes = served.runtime.classes
    answer: dict[str, Any] = {
        "model": served.name,
        "predictions": [_prediction(result, classes, top) for result in results],
    }
    errors = [result for result in results if isinstance(result, ImageError)]
    if len(errors) < len(results):
        return JSONResponse(answer)
    too_large = all(isinstance(error, ImageTooLarge) for error in errors)
    reason = f"the image cannot be read ({errors[0]}): send a complete image file."
    if content_type == "application/x-www-form-urlencoded":  # curl's, whose -d leaves out bytes
        reason += " With curl use --data-binary @FILE, not -d."
    return JSONResponse({"error": reason, **answer}, 413 if too_large else 415)


def _prediction(result: Prediction | ImageError, classes: tuple[str, ...], top: int) -> dict[str, Any]:
    if isinstance(result, ImageError):
        return {"error": str(result)}
    values, attention = result.answer.probabilities, result.answer.attention
    best = top_classes(result.answer.ranking, top).tolist()
    answer: dict[str, Any] = {
        "classes": [
            {"name": classes[index], "probability": value}
            for index, value in zip(best, values[best].tolist(), strict=True)
        ]
    }
    if attention is not None:
        rows, columns = attention.shape
        box = list(result.region)
        answer["attention"] = {"rows": rows, "columns": columns, "values": attention.ravel().tolist(), "box": box}
    return answer


async def models(service: Service, request: Request) -> Response:
    """`GET /models`"""
    return JSONResponse(
        [
            {
                "name": served.name,
                "classes": len(served.runtime.classes),
                "image": list(served.runtime.pipeline.size),
                "attention": served.runtime.attention,
            }
            for served in service.models.values()
        ]
    )


async def healthz(service: Service, request: Request) -> Response:
    """`GET /healthz`: the process answers."""
    return JSONResponse({"live": True})


async def readyz(service: Service, request: Request) -> Response:
    """`GET /readyz`: new requests are welcome."""
    service.check_ready()
    return JSONResponse({"ready": True})


async def metrics(service: Service, request: Request) -> Response:
    """`GET /metrics`"""
    return Response(service.metrics.text(), headers={"Content-Type": service.metrics.content_type})


async def openapi_json(service: Service, request: Request) -> Response:
    """`GET /openapi.json`"""
    return JSONResponse(openapi(list(service.models)))


async def page(service: Service, request: Request) -> Response:
    """`GET /`"""
    return HTMLResponse(server_page(), headers={"Content-Security-Policy": "frame-ancestors 'none'"})


ROUTES: list[tuple[str, str, Endpoint]] = [
    ("POST", "/predict", predict),
    ("GET", "/models", models),
    ("GET", "/healthz", healthz),
    ("GET", "/readyz", readyz),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", openapi_json),
    ("GET", "/", page),
]
