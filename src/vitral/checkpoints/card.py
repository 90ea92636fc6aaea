"""The card of a model: what is needed to use its weights, stored with them; its preprocessing as a callable."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from torch import Tensor

from vitral.architecture import Architecture, Size, as_dict, from_dict
from vitral.data.images import ImageError, PILImage, as_tensor, decode, is_pil, pil_to_array
from vitral.data.pixels import METHODS
from vitral.data.preprocess import Pipeline, parse_deterministic
from vitral.display import SummaryRepr
from vitral.errors import UserError, printable, shorten
from vitral.models.model import normalize
from vitral.names import name_of
from vitral.validation import is_a

ImageInput = np.ndarray | PILImage | str | Path | bytes

_SIZED_STEP = re.compile(r"\s*(?:resize|resize_\w+|pad|\w+_crop)\s*\(")  # steps that begin with one or two sides
_SHOWN_NAMES = 3
_SIDE = re.compile(r"(?<=[(, ])\d+(?=[,) ])")


@dataclass(frozen=True)
class Preprocess:
    """How images become the model's input: a pipeline over uint8 pixels, then (pixel / 255 - mean) / std."""

    pipeline: str  # such as "decode|resize_small(248, bicubic)|central_crop(224)"
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def in_words(self) -> str:
        """The pipeline, then mean and standard deviation, for messages."""
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{self.pipeline}, mean {mean}, std {std}"

    @classmethod
    def assumed(cls, image: Size, channels: int) -> Preprocess:
        """What every verb assumes, and says, where neither the weights nor the user states it.

        The crop of ImageNet evaluation, as the default of `data.eval_transform`, and pixels from -1 to 1, as in the
        paper's code.
        """
        sides = str(image[0]) if image[0] == image[1] else f"{image[0]}, {image[1]}"
        pipeline = f"decode|resize_small({round(min(image) * 8 / 7)})|central_crop({sides})"
        return cls(pipeline, (0.5,) * channels, (0.5,) * channels)

    def adapted(self, before: Size, after: Size, channels: int) -> Preprocess:
        """The preprocessing for another image size, in proportion, and channel count, with the average mean and std."""
        mean, std = self.mean, self.std
        if len(mean) != channels:
            mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
        return Preprocess(self.pipeline if before == after else self._pipeline_to(after), mean, std)

    def _pipeline_to(self, size: Size) -> str:
        """The pipeline for another size: all side lengths scaled or, if the size is not square, one plain resize.

        The current output need not be the model's size: DINOv2's is 518, and its images are cropped to 224.
        """
        steps = self.pipeline.split("|")
        sized = [step for step in steps if _SIZED_STEP.match(step)]
        last = {int(side) for step in sized[-1:] for side in _SIDE.findall(step)[:2]}
        if size[0] != size[1] or len(last) != 1:
            method = self._method()
            return f"decode|resize({size[0]}, {size[1]}" + (f", {method})" if method else ")")
        scale = size[0] / last.pop()
        scaled = {step: _SIDE.sub(lambda side: str(round(int(side[0]) * scale)), step, count=2) for step in sized}
        return "|".join(scaled.get(step, step) for step in steps)

    def _method(self) -> str:
        tokens = re.findall(r"[\w=]+", self.pipeline)
        return next((word for word in tokens if word in (*METHODS, "antialias=false")), "")


@dataclass(frozen=True)
class ImageTransform:
    """Decode, resize, crop and normalise one image, with exactly the pixels that `vitral.predict` uses.

    Instances can be pickled, as DataLoader workers require.
    """

    pipeline: Pipeline
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: ImageInput) -> Tensor:
        """A PIL image, uint8 pixels (height, width, channels), a path or the bytes of an image file -> float32
        (channels, height, width)"""
        pixels = as_tensor(self.pipeline(read_pixels(image, self.channels)))
        return normalize(pixels.permute(2, 0, 1).unsqueeze(0), self.mean, self.std)[0]


@dataclass(frozen=True, repr=False)
class Card(SummaryRepr):
    """What is known about a model besides its weights. Fields that the source does not state are empty, not guessed."""

    architecture: Architecture
    class_names: tuple[str, ...] = ()
    multilabel: bool = False  # outputs are independent (sigmoid) instead of exclusive (softmax)
    temperature: float = 1.0  # what logits are divided by to give probabilities; 1 if none was fitted
    preprocess: Preprocess | None = None
    source: str = ""  # the file or hub name the weights came from
    format: str = ""  # the format they were read in
    sha256: str = ""  # of that file
    licence: str = ""
    changes: tuple[str, ...] = field(default=())  # what was adapted or assumed, in sentences, oldest first

    def transform(self) -> ImageTransform:
        """The preprocessing as a callable, for a `Dataset` or single images.

        It takes a PIL image, uint8 pixels (height, width, channels), a path, or the bytes of an image file, and returns
        a float32 tensor (channels, height, width), the same that `vitral.predict` computes from.

        Raises:
            UserError: if the card does not state the preprocessing.
        """
        if self.preprocess is None:
            height, width = self.architecture.image
            raise UserError(
                "the card does not state the preprocessing of these weights: set it, such as "
                f'replace(card, preprocess=Preprocess("decode|resize({height}, {width})", mean, std)).'
            )
        pipeline = parse_deterministic(self.preprocess.pipeline)
        return ImageTransform(pipeline, self.architecture.channels, self.preprocess.mean, self.preprocess.std)

    def summary(self) -> dict[str, str]:
        names = ", ".join([*self.class_names[:_SHOWN_NAMES], *(["..."] if self.class_names[_SHOWN_NAMES:] else [])])
        values = {
            "model": name_of(self.architecture),
            "classes": f"{self.architecture.classes:,}" + (f" ({names})" if names else ""),
            "format": self.format,
            "source": self.source,
            "preprocess": self.preprocess.in_words() if self.preprocess else "",
            "licence": self.licence,
            "changes": "; ".join(self.changes),
        }
        return {name: printable(value) for name, value in values.items() if value}

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "architecture": as_dict(self.architecture)}

    def to_json(self) -> str:
        """The card as ASCII JSON: file names need not be valid UTF-8, but the metadata of a weight file must be."""
        return json.dumps(self.as_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`. A card that cannot be read is an error, as it defines what the weights compute."""
        try:
            values: dict[str, Any] = json.loads(text)
            preprocess = values.pop("preprocess", None)
            values["architecture"] = from_dict(values["architecture"])
            for key in ("class_names", "changes"):
                values[key] = tuple(values.get(key, ()))
            if preprocess is not None:
                mean, std = tuple(preprocess["mean"]), tuple(preprocess["std"])
                values["preprocess"] = Preprocess(preprocess["pipeline"], mean, std)
                _check_types(values["preprocess"])
            card = cls(**values)
            _check_types(card)
            if not 0 < card.temperature < math.inf:
                raise TypeError(f"temperature={card.temperature}")
            return card
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"the file's card cannot be read ({shorten(error)}): it is damaged or from a newer vitral."
            ) from error


def _check_types(stored: Card | Preprocess) -> None:
    for name, hint in get_type_hints(type(stored)).items():
        if not is_a(getattr(stored, name), hint):
            raise TypeError(f"{name}={shorten(getattr(stored, name))}")


def read_pixels(image: ImageInput, channels: int) -> np.ndarray:
    """uint8 pixels (height, width, channels) of an image, by the decode policy of `vitral.data.images`."""
    if isinstance(image, np.ndarray):
        return _checked_pixels(image, channels)
    name = "this image"
    try:
        if is_pil(image):
            return pil_to_array(image, channels)
        if isinstance(image, str | Path):
            name = str(image)
            image = Path(image).expanduser().read_bytes()
        if isinstance(image, bytes):
            return decode(image, channels)
    except ImageError as error:
        raise UserError(f"{name} cannot be read ({error}): pass a complete image.") from error
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}): pass the path of an image file.") from error
    raise UserError(
        f"a {type(image).__name__} is not an image: pass a PIL image, uint8 pixels (height, width, {channels}), "
        "a path, or the bytes of a file."
    )


def _checked_pixels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Grey pixels, (height, width) or of one channel, are repeated for all channels, as those of a file are."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.size == 0 or pixels.shape[2] not in (1, channels):
        raise UserError(
            f"these pixels are {pixels.dtype} {pixels.shape}: pass uint8 (height, width, {channels}) from 0 to 255."
        )
    return pixels if pixels.shape[2] == channels else np.repeat(pixels, channels, axis=2)
