"""The Open Inference Protocol, version 2, over HTTP (what KServe and Triton speak), under `/v2`.

A model has two inputs, of which a request gives one: `images` (BYTES, encoded files) or `pixels` (UINT8, resized and
cropped already), and the outputs `probabilities` and, if requested, `attention`. Tensors are JSON, or binary as the
extension `binary_tensor_data` defines them; BYTES in JSON are Base64.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitral.data.images import ImageError, ImageTooLarge
from vitral.errors import UserError
from vitral.server.models import Answer, PendingResults, Prediction, ServedModel, top_classes
from vitral.server.requests import RequestError
from vitral.server.runtime import Runtime
from vitral.version import __version__

if TYPE_CHECKING:
    from vitral.server.app import Endpoint, Service

_VERSION = "1"
_LENGTH_HEADER = "Inference-Header-Content-Length"
_IMAGES, _PIXELS = "images", "pixels"


@dataclass(frozen=True)
class InferRequest:
    """A parsed request."""

    images: list[bytes] | None  # encoded files, or
    pixels: np.ndarray | None  # uint8 (batch, height, width, channels)
    outputs: tuple[RequestedOutput, ...]
    identifier: str

    @property
    def count(self) -> int:
        return len(self.images if self.pixels is None else self.pixels)  # type: ignore[arg-type]

    @property
    def attention(self) -> bool:
        return any(output.name == "attention" for output in self.outputs)


@dataclass(frozen=True)
class RequestedOutput:
    """An output and how it is to be encoded."""

    name: str
    binary: bool
    classes: int  # above 0: the top classes as text, by the extension `classification`


async def server_metadata(service: Service, request: Request) -> Response:
    """`GET /v2`"""
    extensions = ["binary_tensor_data", "classification", "model_repository"]
    return JSONResponse({"name": "vitral", "version": __version__, "extensions": extensions})


async def live(service: Service, request: Request) -> Response:
    """`GET /v2/health/live`"""
    return JSONResponse({"live": True})


async def ready(service: Service, request: Request) -> Response:
    """`GET /v2/health/ready`, and of a model: all are ready once the server listens."""
    if "model" in request.path_params:
        _served(service, request)
    service.check_ready()
    return JSONResponse({"ready": True})


async def model_metadata(service: Service, request: Request) -> Response:
    """`GET /v2/models/{model}`"""
    served = _served(service, request)
    runtime = served.runtime
    outputs = [{"name": "probabilities", "datatype": "FP32", "shape": [-1, len(runtime.classes)]}]
    if runtime.attention:
        outputs.append({"name": "attention", "datatype": "FP32", "shape": [-1, -1, -1]})
    return JSONResponse(
        {
            "name": served.name,
            "versions": [_VERSION],
            "platform": runtime.platform,
            "inputs": [
                {"name": _IMAGES, "datatype": "BYTES", "shape": [-1]},
                {"name": _PIXELS, "datatype": "UINT8", "shape": [-1, *runtime.shape]},
            ],
            "outputs": outputs,
        }
    )


async def infer(service: Service, request: Request) -> Response:
    """`POST /v2/models/{model}/infer`"""
    served = _served(service, request)
    async with service.bodies.body(request) as body:
        length = request.headers.get(_LENGTH_HEADER)
        loop = asyncio.get_running_loop()
        parsed = await loop.run_in_executor(service.pool, parse_request, body, length, served.runtime)
        request.state.images, request.state.model = parsed.count, served.name
        results = await service.compute(request, served, parsed.count, lambda: _started(service, served, parsed))
    return _response(served, parsed, results if parsed.images is None else _answers(results))


def _started(service: Service, served: ServedModel, parsed: InferRequest) -> PendingResults:
    if parsed.pixels is not None:
        return served.predict_pixels(parsed.pixels, parsed.attention)
    return served.predict(parsed.images or [], parsed.attention, service.pool)


def _answers(results: Sequence[Prediction | ImageError]) -> list[Answer]:
    answers = []
    for index, result in enumerate(results):
        if isinstance(result, ImageError):
            status = 413 if isinstance(result, ImageTooLarge) else 415
            raise RequestError(status, f"image {index} cannot be read ({result}): send complete image files.")
        answers.append(result.answer)
    return answers


async def repository_index(service: Service, request: Request) -> Response:
    """`POST /v2/repository/index`"""
    names = service.models
    return JSONResponse([{"name": name, "version": _VERSION, "state": "READY", "reason": ""} for name in names])


async def load(service: Service, request: Request) -> Response:
    """`POST /v2/repository/models/{model}/load`: reload the source that the server was started with.

    Only with the token or, if there is none, from this machine and not from a web page.
    """
    served = _served(service, request)
    if not service.settings.token and not _is_local(request):
        raise RequestError(403, "models are reloaded with a token or from this machine: start with --token-file.")
    async with service.bodies.body(request) as body:
        if body and _json(body).get("parameters"):
            raise RequestError(400, "parameters are not accepted: a model is reloaded from where it was loaded.")
    try:
        await service.reload(served)
    except UserError as error:
        raise RequestError(400, f"the old model stays: {error}") from error
    return JSONResponse({})


def _is_local(request: Request) -> bool:
    try:
        return "origin" not in request.headers and ipaddress.ip_address(request.client.host).is_loopback  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        return False


def _served(service: Service, request: Request) -> ServedModel:
    version = request.path_params.get("version", _VERSION)
    if version != _VERSION:
        raise RequestError(404, f"there is no version {version[:40]!r}: every model has version {_VERSION}.")
    return service.model(request.path_params["model"])


def parse_request(body: bytes, header_length: str | None, runtime: Runtime) -> InferRequest:
    """Parse the body of an inference request.

    Args:
        body: JSON, and behind it the binary tensors.
        header_length: bytes of the JSON; all if not given.
        runtime: the model that it is for.

    Raises:
        RequestError: 400 for what does not follow the protocol or does not fit the model.
    """
    if header_length is not None and not (header_length.isdecimal() and int(header_length) <= len(body)):
        raise RequestError(400, f"{_LENGTH_HEADER} is not a number of bytes of the body.")
    split = len(body) if header_length is None else int(header_length)
    values = _json(body[:split])
    inputs = values.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise RequestError(400, f"a request has one input, {_IMAGES} or {_PIXELS}.")
    images, pixels = _input(inputs[0], body[split:], runtime)
    identifier = values.get("id", "")
    outputs = _outputs(values, runtime)
    return InferRequest(images, pixels, outputs, identifier if isinstance(identifier, str) else "")


def _json(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the request is not JSON.") from error
    if not isinstance(values, dict):
        raise RequestError(400, "the request is not a JSON object.")
    return values


def _input(tensor: dict[str, Any], binary: bytes, runtime: Runtime) -> tuple[list[bytes] | None, np.ndarray | None]:
    name, datatype, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if (name, datatype) not in ((_IMAGES, "BYTES"), (_PIXELS, "UINT8")):
        raise RequestError(400, f"the input is {_IMAGES} with datatype BYTES, or {_PIXELS} with datatype UINT8.")
    if not isinstance(shape, list) or not all(type(side) is int and 0 < side < 2**31 for side in shape):
        raise RequestError(400, f"the shape of {name} is not a list of whole numbers above 0.")
    size = _parameters(tensor).get("binary_data_size")
    if size is not None and size != len(binary):
        raise RequestError(400, f"{name} has {len(binary)} binary bytes, and binary_data_size is {str(size)[:40]}.")
    if name == _IMAGES:
        images = _json_bytes(tensor.get("data")) if size is None else _binary_bytes(binary)
        if not images or math.prod(shape) != len(images):
            raise RequestError(400, f"{_IMAGES} has {len(images)} elements, which is not its shape.")
        return images, None
    if tuple(shape[1:]) != runtime.shape:
        raise RequestError(400, f"{_PIXELS} has another shape than (batch, {', '.join(map(str, runtime.shape))}).")
    pixels = _json_pixels(tensor.get("data")) if size is None else np.frombuffer(binary, np.uint8)
    if pixels.size != math.prod(shape):
        raise RequestError(400, f"{_PIXELS} has {pixels.size} elements, which is not its shape.")
    return None, pixels.reshape(shape)


def _json_bytes(data: Any) -> list[bytes]:
    try:
        return [base64.b64decode(text, validate=True) for text in _flat(data)]
    except (TypeError, ValueError, binascii.Error) as error:
        raise RequestError(400, f"the data of {_IMAGES} are not Base64 texts.") from error


def _flat(data: Any) -> list[Any]:
    """The elements of a list, or of a list of lists."""
    if not isinstance(data, list):
        raise TypeError
    return [element for row in data for element in (row if isinstance(row, list) else [row])]


def _binary_bytes(binary: bytes) -> list[bytes]:
    """Elements of BYTES: a length of 4 bytes before each."""
    elements, offset = [], 0
    while offset + 4 <= len(binary):
        (length,) = struct.unpack_from("<I", binary, offset)
        elements.append(binary[offset + 4 : offset + 4 + length])
        offset += 4 + length
    if offset != len(binary):
        raise RequestError(400, f"the binary data of {_IMAGES} end within an element.")
    return elements


def _json_pixels(data: Any) -> np.ndarray:
    try:
        values = np.array(data)
    except ValueError:  # rows of different lengths
        values = np.array(())
    if values.dtype.kind != "i" or values.min() < 0 or values.max() > 255:
        raise RequestError(400, f"the data of {_PIXELS} are not whole numbers from 0 to 255.")
    return values.astype(np.uint8).ravel()


def _outputs(values: dict[str, Any], runtime: Runtime) -> tuple[RequestedOutput, ...]:
    all_binary = _parameters(values).get("binary_data_output") is True
    given = values.get("outputs") or [{"name": "probabilities"}]
    available = ("probabilities", "attention") if runtime.attention else ("probabilities",)
    if not isinstance(given, list):
        raise RequestError(400, "outputs is not a list.")
    outputs = []
    for output in given:
        if not isinstance(output, dict) or output.get("name") not in available:
            raise RequestError(400, f"the outputs of this model are {' and '.join(available)}.")
        parameters = _parameters(output)
        classes = parameters.get("classification", 0)
        if type(classes) is not int or classes < 0 or (classes and output["name"] != "probabilities"):
            raise RequestError(400, "classification is a number of classes of probabilities.")
        binary = parameters.get("binary_data", all_binary) is True
        outputs.append(RequestedOutput(output["name"], binary, min(classes, len(runtime.classes))))
    return tuple(outputs)


def _parameters(values: dict[str, Any]) -> dict[str, Any]:
    parameters = values.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, "parameters is not an object.")
    return parameters


def _response(served: ServedModel, parsed: InferRequest, answers: Sequence[Answer]) -> Response:
    described: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for output in parsed.outputs:
        tensor, tail = _encoded(output, answers, served.runtime.classes)
        described.append(tensor)
        tails.append(tail)
    values = {"model_name": served.name, "model_version": _VERSION, "outputs": described}
    if parsed.identifier:
        values["id"] = parsed.identifier
    if not any(output.binary for output in parsed.outputs):
        return JSONResponse(values)
    head = json.dumps(values).encode()
    return Response(
        head + b"".join(tails), media_type="application/octet-stream", headers={_LENGTH_HEADER: str(len(head))}
    )


def _encoded(
    output: RequestedOutput, answers: Sequence[Answer], classes: tuple[str, ...]
) -> tuple[dict[str, Any], bytes]:
    """A tensor of the answer, and the bytes behind the JSON if it is binary."""
    if output.classes:
        texts = [_top_texts(answer, classes, output.classes) for answer in answers]
        tensor: dict[str, Any] = {"name": output.name, "datatype": "BYTES", "shape": [len(texts), output.classes]}
        data = [text for row in texts for text in row]
        encoded = [text.encode() for text in data]
        tail = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    else:
        array = np.stack([getattr(answer, output.name) for answer in answers]).astype(np.float32)
        tensor = {"name": output.name, "datatype": "FP32", "shape": list(array.shape)}
        data, tail = array.ravel().tolist(), array.astype("<f4").tobytes()
    if output.binary:
        return {**tensor, "parameters": {"binary_data_size": len(tail)}}, tail
    return {**tensor, "data": data}, b""


def _top_texts(answer: Answer, classes: tuple[str, ...], count: int) -> list[str]:
    best = top_classes(answer.ranking, count)
    return [f"{answer.probabilities[index]:.6f}:{index}:{classes[index]}" for index in best]


ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/v2", server_metadata),
    ("GET", "/v2/health/live", live),
    ("GET", "/v2/health/ready", ready),
    *(
        (method, f"/v2/models/{{model}}{version}{path}", endpoint)
        for version in ("", "/versions/{version}")
        for method, path, endpoint in (("GET", "", model_metadata), ("GET", "/ready", ready), ("POST", "/infer", infer))
    ),
    ("POST", "/v2/repository/index", repository_index),
    ("POST", "/v2/repository/models/{model}/load", load),
]
