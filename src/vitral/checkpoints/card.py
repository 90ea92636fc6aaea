"""What travels with the weights: enough to use them without asking anyone."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from vitral.architecture import Architecture, Size, as_dict, from_dict
from vitral.errors import UserError


@dataclass(frozen=True)
class Preprocess:
    """How pixels become the model's input: a pipeline over uint8 images, then (pixel / 255 - mean) / std."""

    pipeline: str  # as in "decode|resize_small(248, bicubic)|central_crop(224)"
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def steps(self) -> list[tuple[str, list[str]]]:
        """The pipeline after decode: [("resize_small", ["248", "bicubic"]), ("central_crop", ["224"])]."""
        found = re.findall(r"(\w+)(?:\(([^)]*)\))?", self.pipeline)
        return [(name, [part.strip() for part in inside.split(",") if part.strip()]) for name, inside in found][1:]

    def adapted(self, before: Size, after: Size, channels: int) -> Preprocess:
        """Other image sizes keep the proportions; other channel counts get the average mean and std in each."""
        mean, std = self.mean, self.std
        if len(mean) != channels:
            mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
        if before == after:
            return Preprocess(self.pipeline, mean, std)
        if after[0] != after[1] or before[0] != before[1]:
            method = next((word for _, words in self.steps() for word in words if not word.isdigit()), "")
            size = f"{after[0]}, {after[1]}" + (f", {method}" if method else "")
            return Preprocess(f"decode|resize({size})", mean, std)
        scale = after[0] / before[0]
        pipeline = re.sub(r"(?<=[(, ])\d+", lambda number: str(round(int(number[0]) * scale)), self.pipeline)
        return Preprocess(pipeline, mean, std)


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
        values = {**asdict(self), "architecture": as_dict(self.architecture)}
        return json.dumps(values, ensure_ascii=False, sort_keys=True)

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
