"""`vitral serve` with a model that answers at once, for what HTTP and decoding cost; used by `serve_load.py --instant`.

    python benchmarks/serve_instant.py WEIGHTS PORT decode|none

With `none`, images are not even decoded.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

import vitral
from vitral.server import runtime
from vitral.server.runtime import Outputs, Runtime, ServedImage

MAX_BATCH = 64  # and a wait for batches: as on a GPU


class Undecoded(Runtime):
    """Takes any bytes for a black image."""

    def decode(self, data: bytes) -> ServedImage:
        return ServedImage(np.zeros(self.shape, np.uint8), (0.0, 0.0, 1.0, 1.0))


def main() -> None:
    weights, port, decoding = sys.argv[1:]
    load = runtime.torch_runtime

    def instant(*arguments: Any, **options: Any) -> Runtime:
        real = load(*arguments, **options)
        values = np.random.default_rng(0).random((MAX_BATCH, len(real.classes)), np.float32)

        def run(pixels: np.ndarray, attention: bool) -> Outputs:
            return Outputs(values[: len(pixels)], values[: len(pixels)], None)

        fast = replace(real, runners=(run, run), attention=False, gains_by_batch=True)
        if decoding == "none":
            fast = Undecoded(fast.card, fast.pipeline, fast.runners, False, fast.platform, True)
        return fast

    runtime.torch_runtime = instant
    vitral.serve([weights], port=int(port), max_batch=MAX_BATCH, device="cpu")


if __name__ == "__main__":
    main()
