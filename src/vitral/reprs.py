"""How results show themselves: one line in a console, a small table in a notebook. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_SHOWN = 4  # entries of the summary in one line


class SummaryRepr:
    """Base of result classes: `repr` and the HTML of notebooks are made of `summary`."""

    def summary(self) -> Mapping[str, str]:
        """The result in a few values, the headline number first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        entries = list(self.summary().items())[:_SHOWN]
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in entries)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def score_summary(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The headline number of an evaluation and its number of images."""
    for key, name in (("masked_loss", "masked_loss"), ("mean_average_precision", "mAP"), ("top1", "top1")):
        value = metrics.get(key)
        if value is not None:
            return {name: f"{value:.4f}" if key == "masked_loss" else f"{value:.2%}", "n": f"{metrics['n']:,}"}
    return {"n": f"{metrics['n']:,}"}
