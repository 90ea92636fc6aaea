"""The OpenAPI description of the server: `/openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitral.version import __version__

Json = dict[str, Any]

_ERRORS = {
    400: "the request is not understood",
    401: "the token is missing or wrong",
    403: "models are reloaded with a token or from this machine",
    404: "there is no such model",
    408: "the body did not arrive in time",
    413: "the body, the image or the number of images is too large",
    415: "no image could be read",
    429: "the queue is full: retry after the seconds of Retry-After",
    503: "the answer was not ready in time, or the server is shutting down: retry after the seconds of Retry-After",
}
_COMPUTING = (400, 401, 404, 408, 413, 415, 429, 503)
_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}


def openapi(models: Sequence[str]) -> Json:
    """The whole description, for models of these names."""
    model = _path("model", {"type": "string", "enum": list(models)})
    paths: Json = {
        "/predict": {"post": _predict(models)},
        "/models": {"get": _get("The models", _list(_model()), (401,))},
        "/healthz": {"get": _get("Whether the process answers", _object(live={"type": "boolean"}))},
        "/readyz": {"get": _get("Whether requests are welcome", _object(ready={"type": "boolean"}), (503,))},
        "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": {"schema": _TEXT}}, (401,))},
        "/openapi.json": {"get": _get("This description", {"type": "object"}, (401,))},
        "/": {"get": _operation("A page to try the models", {"text/html": {"schema": _TEXT}}, ())},
        "/v2": {"get": _get("Open Inference Protocol: the server", _v2_server(), (401,))},
        "/v2/health/live": {"get": _get("Open Inference Protocol: live", _object(live={"type": "boolean"}))},
        "/v2/health/ready": {"get": _get("Open Inference Protocol: ready", _object(ready={"type": "boolean"}), (503,))},
        "/v2/repository/index": {"post": _get("Open Inference Protocol: all models", _list(_object()), (401,))},
        "/v2/repository/models/{model}/load": {
            "post": {
                **_get("Reload a model from its source", {"type": "object"}, (400, 401, 403, 404, 408, 413, 415, 429)),
                "parameters": [model],
            }
        },
    }
    for version in ("", "/versions/{version}"):
        parameters = [model, *([_path("version", {"type": "string", "enum": ["1"]})] if version else [])]
        for path, method, operation in (
            ("", "get", _get("Open Inference Protocol: a model", _v2_model(), (401, 404))),
            ("/ready", "get", _get("Open Inference Protocol: a model is ready", _object(), (401, 404, 503))),
            ("/infer", "post", _infer()),
        ):
            paths[f"/v2/models/{{model}}{version}{path}"] = {method: {**operation, "parameters": parameters}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "vitral", "version": __version__, "description": "Vision Transformers behind HTTP."},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _predict(models: Sequence[str]) -> Json:
    image = {"type": "string", "format": "binary", "minLength": 1}
    form = {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}, "minProperties": 1}
    return {
        **_get("The top classes of images", _predictions(), _COMPUTING),
        "parameters": [
            _query("model", {"type": "string", "enum": list(models)}, "model; the first one by default"),
            _query("top", {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 5}, "number of classes"),
            _query("attention", {"type": "integer", "enum": [0, 1]}, "whether to return where the model looked"),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "image/*": {"schema": image},
                "application/octet-stream": {"schema": image},
                "multipart/form-data": {"schema": form},
            },
        },
    }


def _infer() -> Json:
    tensor = _object(name=_TEXT, datatype=_TEXT, shape=_list(_WHOLE))
    answer = _object(model_name=_TEXT, model_version=_TEXT, outputs=_list(tensor))
    operation = _get("Open Inference Protocol: inference", answer, _COMPUTING)
    operation["responses"]["200"]["content"]["application/octet-stream"] = {"schema": {"type": "string"}}
    given = {"name": {"enum": ["images"]}, "datatype": {"enum": ["BYTES"]}, "shape": _list(_WHOLE)}
    encoded = _object(**given, data=_list({"type": "string", "contentEncoding": "base64"}))
    pixels = _object(name={"enum": ["pixels"]}, datatype={"enum": ["UINT8"]}, shape=_list(_WHOLE), data=_list(_WHOLE))
    inputs = {"type": "array", "items": {"oneOf": [encoded, pixels]}, "minItems": 1, "maxItems": 1}
    content = {"application/json": {"schema": _object(inputs=inputs)}, "application/octet-stream": {}}
    return {**operation, "requestBody": {"required": True, "content": content}}


def _predictions() -> Json:
    attention = _object(rows=_WHOLE, columns=_WHOLE, values=_list(_NUMBER), box=_list(_NUMBER))
    classes = _list(_object(name=_TEXT, probability=_NUMBER))
    prediction = {"type": "object", "properties": {"classes": classes, "attention": attention, "error": _TEXT}}
    return _object(model=_TEXT, predictions=_list(prediction))


def _model() -> Json:
    return _object(name=_TEXT, classes=_WHOLE, image=_list(_WHOLE), attention={"type": "boolean"})


def _v2_server() -> Json:
    return _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT))


def _v2_model() -> Json:
    tensors = _list(_object(name=_TEXT, datatype=_TEXT, shape=_list(_WHOLE)))
    return _object(name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=tensors, outputs=tensors)


def _get(summary: str, schema: Json, errors: tuple[int, ...] = ()) -> Json:
    return _operation(summary, {"application/json": {"schema": schema}}, errors)


def _operation(summary: str, content: Json, errors: tuple[int, ...]) -> Json:
    responses: Json = {"200": {"description": summary, "content": content}}
    error = {"application/json": {"schema": _object(error=_TEXT)}}
    responses |= {str(status): {"description": _ERRORS[status], "content": error} for status in errors}
    return {"summary": summary, "responses": responses}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _path(name: str, schema: Json) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}
