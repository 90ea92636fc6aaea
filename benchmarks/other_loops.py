"""Train a small ViT in loops of other libraries, and read what they write: does it learn, and are the logits the same?

pip install lightning accelerate skorch peft transformers
python benchmarks/other_loops.py

A library that is not installed is left out. The exit status is 1 if a model does not learn or is read differently.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vitral
from vitral.models.build import build

CONFIG = vitral.ViTConfig(depth=2, width=32, mlp=64, heads=2, patch=8, image=(32, 32), classes=3, layer_scale=True)
LABELS = torch.arange(48) % 3
COLOURS = torch.eye(3)[LABELS, :, None, None]
IMAGES = COLOURS + 0.1 * torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(IMAGES, LABELS)
LR, EPOCHS, BATCH = 1e-2, 20, 8

Trained = tuple[nn.Module, Path]  # a model, and what the library wrote of it


def new_model() -> nn.Module:
    torch.manual_seed(0)
    model = build(CONFIG)
    model.set_grad_checkpointing()
    return model


class WithLoss(nn.Module):
    """What the Trainer of transformers wants."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def lightning(folder: Path, precision: Any) -> Trained:
    import lightning  # type: ignore[import-not-found]
    from lightning.pytorch.callbacks import StochasticWeightAveraging  # type: ignore[import-not-found]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), LR)

    module = Module()
    averaging = [StochasticWeightAveraging(LR / 10)] if precision == "32-true" else []
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=EPOCHS,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=averaging,
        **quiet,
    )
    trainer.fit(module, DataLoader(DATA, BATCH, shuffle=True))
    trainer.save_checkpoint(folder / "model.ckpt")
    return module.model.float(), folder / "model.ckpt"


def accelerate(folder: Path, precision: Any) -> Trained:
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    own = new_model()
    optimizer = torch.optim.AdamW(vitral.parameter_groups(own, lr=LR, layer_decay=0.9))
    model, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(DATA, BATCH, shuffle=True))
    for _ in range(EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_model(model, folder)
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False), folder / "model.safetensors"


def transformers(folder: Path, precision: Any) -> Trained:
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        save_steps=20,
        bf16=precision == "bf16",
        **options,
    )
    Trainer(WithLoss(), arguments, train_dataset=rows).train()
    (folder / f"checkpoint-{EPOCHS * len(rows) // BATCH}").rename(folder / "last")  # goes on from an earlier one
    resumed = WithLoss()
    Trainer(resumed, arguments, train_dataset=rows).train(resume_from_checkpoint=True)
    return resumed.model, folder / f"checkpoint-{EPOCHS * len(rows) // BATCH}" / "model.safetensors"


def skorch(folder: Path, precision: Any) -> Trained:
    from skorch import NeuralNetClassifier  # type: ignore[import-not-found]

    net = NeuralNetClassifier(
        new_model(),
        max_epochs=EPOCHS,
        batch_size=BATCH,
        lr=LR,
        optimizer=torch.optim.AdamW,
        criterion=nn.CrossEntropyLoss,
        train_split=None,
        verbose=0,
    )
    net.fit(IMAGES.numpy(), LABELS.numpy())
    net.save_params(folder / "model.pt")
    return net.module_, folder / "model.pt"


def peft(folder: Path, precision: Any) -> Trained:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    own: Any = new_model()
    layers = LoraConfig(r=2, target_modules=["qkv", "out", "hidden"], modules_to_save=["head"])
    adapted = get_peft_model(own, layers)
    optimizer = torch.optim.AdamW([weight for weight in adapted.parameters() if weight.requires_grad], LR)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(DATA, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(adapted(images), labels).backward()
            optimizer.step()
    merged: Any = adapted.merge_and_unload()
    vitral.save(merged, folder / "model.safetensors")
    return merged, folder / "model.safetensors"


LOOPS: list[tuple[Callable[[Path, Any], Trained], tuple[str, ...]]] = [
    (lightning, ("32-true", "bf16-mixed", "bf16-true")),
    (accelerate, ("bf16",)),
    (transformers, ("float32", "bf16")),
    (skorch, ("float32",)),
    (peft, ("float32",)),
]


@torch.no_grad()
def compare(model: nn.Module, written: Path) -> tuple[float, float]:
    """Accuracy on the training images, and how far the logits of the written model are from the model's."""
    logits = model.eval()(IMAGES)
    read, _ = vitral.load(written, heads=CONFIG.heads, part="state_dict" if written.suffix == ".ckpt" else None)
    return float((logits.argmax(1) == LABELS).float().mean()), float((read.float()(IMAGES) - logits).abs().max())


def main() -> None:
    warnings.simplefilter("ignore")
    failed = False
    for loop, precisions in LOOPS:
        if importlib.util.find_spec(loop.__name__) is None:
            print(f"{loop.__name__}: not installed")
            continue
        for precision in precisions:
            with tempfile.TemporaryDirectory() as folder:
                accuracy, gap = compare(*loop(Path(folder), precision))
            failed |= accuracy < 0.95 or gap > 1e-4
            print(f"{loop.__name__} {precision}: accuracy {accuracy:.0%}, logits read again differ by {gap:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
