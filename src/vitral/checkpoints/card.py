"""What travels with the weights: enough to use them without asking anyone."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from vitral.architecture import Architecture, Size, as_dict, from_dict
from vitral.errors import UserError

_SIZED = re.compile(r"\s*(?:resize|resize_small|\w+_crop)\s*\(")  # steps whose whole numbers are sides
_SIDE = re.compile(r"(?<=[(, ])\d+(?=[,) ])")


class Brief(NamedTuple):
    """What other libraries say of a pipeline: how it resizes, and the size at its end."""

    short: int | None  # the short side before a central crop; None where both sides are resized to `size`
    size: Size
    method: str


@dataclass(frozen=True)
class Preprocess:
    """How pixels become the model's input: a pipeline over uint8 images, then (pixel / 255 - mean) / std."""

    pipeline: str  # as in "decode|resize_small(248, bicubic)|central_crop(224)"
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def steps(self) -> list[tuple[str, list[str]]]:
        """The pipeline after decode: [("resize_small", ["248", "bicubic"]), ("central_crop", ["224"])]."""
        found = re.findall(r"(\w+)\s*(?:\(([^)]*)\))?", self.pipeline)
        return [(name, [part.strip() for part in inside.split(",") if part.strip()]) for name, inside in found][1:]

    def brief(self) -> Brief | None:
        """The pipeline in the terms of other libraries; None where it takes more than those."""
        steps = self.steps()
        sides = [[int(word) for word in words if word.isdigit()] for _, words in steps]
        method = self._method() or "bilinear"
        match [name for name, _ in steps]:
            case ["resize"]:
                return Brief(None, (sides[0][0], sides[0][-1]), method)
            case ["resize_small", "central_crop"]:
                return Brief(sides[0][0], (sides[1][0], sides[1][-1]), method)
        return None

    def adapted(self, before: Size, after: Size, channels: int) -> Preprocess:
        """Other image sizes keep the proportions; other channel counts get the average mean and std in each."""
        mean, std = self.mean, self.std
        if len(mean) != channels:
            mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
        return Preprocess(self.pipeline if before == after else self._ending_in(after), mean, std)

    def _ending_in(self, size: Size) -> str:
        """The pipeline for another size: every side scaled alike or, where a size is not square, one plain resize.

        What it ends in now need not be the model's own size: DINOv2's is 518, and its pictures are cut to 224.
        """
        steps = self.pipeline.split("|")
        sized = [step for step in steps if _SIZED.match(step)]
        last = {int(side) for step in sized[-1:] for side in _SIDE.findall(step)}
        if size[0] != size[1] or len(last) != 1:
            method = self._method()
            return f"decode|resize({size[0]}, {size[1]}" + (f", {method})" if method else ")")
        scale = size[0] / last.pop()
        scaled = {step: _SIDE.sub(lambda side: str(round(int(side[0]) * scale)), step) for step in sized}
        return "|".join(scaled.get(step, step) for step in steps)

    def _method(self) -> str:
        return next((word for _, words in self.steps() for word in words if word.isalpha()), "")


@dataclass(frozen=True)
class Card:
    """A model's passport. Fields that the source did not state are empty, never guessed."""

    architecture: Architecture
    class_names: tuple[str, ...] = ()
    multilabel: bool = False  # outputs are a yes or no each (sigmoid), not shares of one (softmax)
    preprocess: Preprocess | None = None
    source: str = ""  # the file or hub name the weights came from
    format: str = ""  # the format they were read in
    sha256: str = ""  # of that file
    licence: str = ""
    changes: tuple[str, ...] = field(default=())  # what was adapted since, in words, oldest first

    def to_json(self) -> str:
        """ASCII: a folder's name need not be valid UTF-8, the text in a weight file must."""
        values = {**asdict(self), "architecture": as_dict(self.architecture)}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`; a card we cannot read is refused, since it says what the weights compute."""
        try:
            values: dict[str, Any] = json.loads(text)
            preprocess = values.pop("preprocess", None)
            values["architecture"] = from_dict(values["architecture"])
            for key in ("class_names", "changes"):
                values[key] = tuple(values.get(key, ()))
            if preprocess is not None:
                mean, std = tuple(preprocess["mean"]), tuple(preprocess["std"])
                values["preprocess"] = Preprocess(preprocess["pipeline"], mean, std)
            return cls(**values)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise UserError(
                f"the file's card cannot be read ({error}): it is damaged or from a newer vitral."
            ) from error
