"""`vitral demo`: the whole way in two minutes, on real images that come with scikit-learn."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from vitral.cli.output import print_facts, print_table
from vitral.cli.train import write_page
from vitral.progress import Display, headline


def demo() -> None:
    """Train a small ViT on handwritten digits, fine-tune it at twice the resolution, and let it read some of them."""
    from vitral import api

    print("1. Train a Vision Transformer from scratch on 1,438 handwritten digits of 8x8 pixels")
    first = _train("digits", init="", overrides=())
    print("\n2. Fine-tune it at 16x16 pixels: its position table is resized, its patches stay 2x2")
    second = _train("digits", init=first, overrides=("image=16", "epochs=10", "optim.lr=5e-4", "optim.layer_decay=1"))
    print("\n3. Let it read digits that it has not seen")
    pictures = api.write_pictures("digits", Path(second) / "pictures", count=8)
    found = api.predict(second, pictures, top=2)
    cells = [
        [
            Path(row.path).name,
            f"{row.names[0]} ({row.probabilities[0]:.0%})",
            f"{row.names[1]} ({row.probabilities[1]:.0%})",
        ]
        for row in found.rows
    ]
    print_table(["picture (its name is the truth)", "reads", "or"], cells, left=3)
    print("\n4. ImageInspection at what it learned")
    page = write_page(second, "digits")
    print_facts({"page": f"{page} (open it in a browser: curves, mistakes, where the model looks)"})
    _open(page)
    print_facts({"results": f"{first}, {second} (recipe.toml, metrics.jsonl, model.safetensors, result.json)"})
    print("\nNext, with a folder that has one sub-folder of pictures per class:")
    print("  vitral check photos/")
    print("  vitral train photos/ --init hf:google/vit-base-patch16-224")
    print(f"  vitral evaluate {second} digits")


def _open(page: str) -> None:
    """In the browser, where a person watches."""
    if sys.stdout.isatty() and Path(page).is_file():
        webbrowser.open(Path(page).resolve().as_uri())


def _train(data: str, init: str, overrides: tuple[str, ...]) -> str:
    """Train, show how it goes and how it went, and say where."""
    from vitral import api

    with Display() as display:
        result = api.train(data, init=init, set=overrides, on_event=display).results[0]
    print(f"   {headline(result.metrics)} after {result.seconds:.0f} s, {result.images_per_second:,.0f} images/s")
    return result.folder
