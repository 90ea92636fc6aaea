"""`demo`: training, fine-tuning and prediction on real images that come with scikit-learn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitral.api.inspection import write_run_page
from vitral.api.prediction import predict, write_sample_images
from vitral.api.training import train
from vitral.display import SummaryRepr, displayed, headline
from vitral.events import EventHandler, Note
from vitral.serving import PredictionResults


@dataclass(frozen=True, repr=False)
class DemoResult(SummaryRepr):
    """The run folders of the demonstration, its predictions and its page."""

    folders: tuple[str, str]  # trained from scratch, fine-tuned
    accuracy: float
    n: int
    predictions: PredictionResults
    page: Path

    def summary(self) -> dict[str, str]:
        return {"top1": f"{self.accuracy:.2%}", "n": f"{self.n:,}", "page": str(self.page)}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "predictions": self.predictions.as_dict(), "page": str(self.page)}


def demo(*, on_event: EventHandler | None = None) -> DemoResult:
    """Train, fine-tune and predict in two minutes, on handwritten digits.

    Args:
        on_event: handler of the events of the runs.

    Returns:
        The run folders, predictions of held-out images, and a page about the model.
    """
    changes = {"image": 16, "epochs": 10, "optim.lr": 5e-4, "optim.layer_decay": 1}
    with displayed(on_event) as handler:
        handler(Note("1. Train a Vision Transformer from scratch on 1,438 handwritten digits of 8x8 pixels"))
        first = train("digits", on_event=handler).results[0]
        handler(Note(f"   {headline(first.metrics)} after {first.seconds:.0f} s"))
        handler(Note("2. Fine-tune it at 16x16 pixels: position embeddings are resized, patches stay 2x2"))
        second = train("digits", init=first.folder, set=changes, on_event=handler).results[0]
        handler(Note(f"   {headline(second.metrics)} after {second.seconds:.0f} s"))
        handler(Note("3. Predict digits that it was not trained on"))
        images = write_sample_images("digits", Path(second.folder) / "pictures", count=8)
        predictions = predict(second.folder, images, top=2, on_event=handler)
        handler(Note("4. Write a page about what it has learned"))
        page = write_run_page(second.folder, "digits")
    metrics = second.metrics
    return DemoResult((first.folder, second.folder), metrics["top1"], metrics["n"], predictions, page)
