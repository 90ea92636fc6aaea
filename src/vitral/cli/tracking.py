"""TensorBoard events of a run, an extra: pip install 'vitral[track]'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitral.errors import UserError

if TYPE_CHECKING:
    from vitral.api import Event


class TensorBoard:
    """Listens to a run and writes scalars into FOLDER/tensorboard."""

    def __init__(self, folder: str) -> None:
        if not folder:
            raise UserError("--tensorboard needs --out, the folder to write into.")
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError("--tensorboard needs an extra: pip install 'vitral[track]'.") from error
        self.writer = SummaryWriter(str(Path(folder) / "tensorboard"))

    def hear(self, event: Event) -> None:
        from vitral import api

        if isinstance(event, api.StepDone):
            values = {"loss": event.loss, "rate": event.rate, "waited": event.waited, "accuracy": event.accuracy}
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(f"train/{name}", value, event.step)
        elif isinstance(event, api.Evaluated):
            for name, value in event.metrics.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(f"test/{name}", value, event.step)
            self.writer.flush()

    def close(self) -> None:
        """Write out what is still waiting."""
        self.writer.close()
