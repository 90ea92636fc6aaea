"""What an answer rests on: a map over the patches for one class of each image, and a curve that tests such maps.

Every map is (b, h, w), larger where a patch speaks more for the class, without a common scale; those of attention show
what speaks for it only, and are zero where nothing does. The class is the one that the model predicts unless `classes`
(b,) names others. `sigmoid` is for models whose outputs are a yes or no each (`Card.multilabel`): what such a map says
of a class depends on no other class. Models are taken in evaluation mode, as `vitral.load` gives them; images are
normalised, of any size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.architecture import Size
from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.capture import LayerKey, capture
from vitral.models.vit import ViT


def gradient_rollout(model: Model, images: Tensor, classes: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """Attention followed from the answer down to the patches, heads weighted by what they did for the class.

    After Chefer et al. 2021 ("Generic Attention-model Explainability"): R starts as the identity, and each layer from
    the first to the last adds S R, where S is the mean over heads of the positive part of A * dscore/dA. The answer
    reads R as `_Evidence.reading` says. One departure: S is divided by its largest row sum. Gradients shrink with the
    number of tokens that share an answer, and beside the identity a layer of a mean-pooled model would not count.
    """
    found = _evidence(model, images, classes, sigmoid)
    batch, tokens = found.reading.shape
    relevance = torch.eye(tokens, device=images.device).expand(batch, -1, -1)
    for key, attention in found.attentions.items():
        relevance = _followed(relevance, attention, key, found.grid)
    return _on_grid(torch.einsum("bn,bnm->bm", found.reading, relevance), found.grid)


def attention_gradient(
    model: Model, images: Tensor, classes: Tensor | None = None, *, layers: int | None = None, sigmoid: bool = False
) -> Tensor:
    """The positive part of attention times its gradient, mean over heads and layers, as the answer reads it.

    `layers` takes the last ones only. All are the default: the last alone misses what earlier ones moved elsewhere.
    """
    if isinstance(model, ViT) and model.config.axial:
        raise UserError("one axial layer sees only lines of patches: use gradient_rollout, which joins them.")
    if layers is not None and layers < 1:
        raise UserError(f"layers must be at least 1, not {layers}.")
    found = _evidence(model, images, classes, sigmoid)
    last = list(found.attentions.values())[-(layers or 0) :]  # -0 is the first
    return _on_grid(torch.einsum("bn,bnm->bm", found.reading, torch.stack(last).mean(0)), found.grid)


@torch.no_grad()
def occlusion(
    model: Model,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    window: int = 1,
    batch: int = 64,
    sigmoid: bool = False,
) -> Tensor:
    """How far the probability of the class falls when the window around a patch is painted in the image's mean colour.

    `window` is an odd number of patches a side; `batch` painted images are tried at a time. Needs no attention: for a
    ResNet, a patch is a place of the last feature map.
    """
    if window < 1 or window % 2 == 0:
        raise UserError(f"the window around a patch has an odd number of patches a side, not {window}.")
    height, width = _grid(model, images)
    centres = torch.eye(height * width, device=images.device).view(-1, 1, height, width)
    windows = F.max_pool2d(centres, window, stride=1, padding=window // 2)[:, 0].bool()
    logits = model(images)
    chosen = _classes(model, logits, classes)
    before = _probabilities(logits, chosen, sigmoid)
    drops = []
    for image, own, probability in zip(images, chosen, before, strict=True):
        after = [_paint_and_ask(model, image[None], cells, own[None], sigmoid) for cells in windows.split(batch)]
        drops.append((probability - torch.cat(after)).view(height, width))
    return torch.stack(drops)


@torch.no_grad()
def deletion_curve(
    model: Model,
    images: Tensor,
    maps: Tensor,
    steps: int = 20,
    classes: Tensor | None = None,
    *,
    sigmoid: bool = False,
) -> Tensor:
    """(steps + 1,): the mean probability of the class as patches are painted over, those first that `maps` puts first.

    Step i paints the fraction i / steps of the patches in the image's mean colour; the first entry is the whole image.
    A map that found what matters makes the curve fall early (Petsiuk et al. 2018).
    """
    height, width = _grid(model, images)
    if maps.shape != (len(images), height, width) or steps < 1:
        raise UserError(
            f"maps of shape {tuple(maps.shape)} in {steps} steps cannot be tested: "
            f"give {(len(images), height, width)} and at least one step."
        )
    chosen = _classes(model, model(images), classes)
    ranks = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).view_as(maps)
    counts = [round(height * width * step / steps) for step in range(steps + 1)]
    return torch.stack([_paint_and_ask(model, images, ranks < count, chosen, sigmoid).mean() for count in counts])


def deletion_area(curve: Tensor) -> float:
    """The area under a deletion curve over fractions from 0 to 1, by trapezoids: smaller is better."""
    return float(torch.trapezoid(curve.double(), dx=1 / (len(curve) - 1)))


def random_maps(model: Model, images: Tensor, seed: int = 0) -> Tensor:
    """(b, h, w) of chance, the same for a seed: what a deletion curve has to beat."""
    shape = (len(images), *_grid(model, images))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(images.device)


class _Evidence(NamedTuple):
    """What one pass forward and one back tell of the chosen classes."""

    # In the order of the computation, and each with its own gradient: zipping the order in which a backward pass meets
    # the layers with that of the forward pass is how rollouts go wrong. (b, n, n); in axial blocks (b * lines, n, n).
    attentions: dict[LayerKey, Tensor]
    # (b, n): how much of each token the answer reads. The class token alone where it is pooled; else the positive part
    # of token times gradient, which is weight times gradient of pooling seen as attention.
    reading: Tensor
    grid: Size


def _evidence(model: Model, images: Tensor, classes: Tensor | None, sigmoid: bool) -> _Evidence:
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no attention to follow: use occlusion.")
    # An input with a gradient makes the pass record one also where all weights are frozen.
    with torch.enable_grad(), capture(model, rows="all", gradients=True) as seen:
        tokens = model.encode(model.patchify(images.detach().clone().requires_grad_()))
        logits = model.head(model.pool(tokens))
        # A softmax does not see what is common to all logits, and what only raises them all is no evidence; a sigmoid
        # sees it.
        visible = logits if _alone(logits, sigmoid) else logits - logits.mean(1, keepdim=True)
        score = visible.gather(1, _classes(model, logits, classes)[:, None]).sum()
    gradients = seen.gradients(score)
    attentions = {key: (seen[key] * gradients[key]).clamp(min=0).mean(1) for key in seen.keys}
    (gradient,) = torch.autograd.grad(score, tokens)
    reading = (tokens.detach() * gradient).float().sum(-1).clamp(min=0)
    if model.config.pool == "token":
        reading = torch.zeros_like(reading)
        reading[:, 0] = 1.0
    return _Evidence(attentions, reading, _grid(model, images))


def _followed(relevance: Tensor, attention: Tensor, key: LayerKey, grid: Size) -> Tensor:
    """R (b, n, m) -> R + S R; an axial attention joins the patches of a row or of a column only."""
    groups = attention.unflatten(0, (len(relevance), -1))  # (b, lines, n, n); but for axial attention one line of all
    groups = groups / groups.sum(-1).amax((1, 2)).clamp_min(1e-30)[:, None, None, None]
    if isinstance(key, int):
        return relevance + groups[:, 0] @ relevance
    lines = relevance.unflatten(1, grid)
    lines = lines if key[1] == "row" else lines.transpose(1, 2)  # (b, lines, patches, m)
    lines = lines + groups @ lines
    lines = lines if key[1] == "row" else lines.transpose(1, 2)
    return lines.flatten(1, 2)


def _on_grid(relevance: Tensor, grid: Size) -> Tensor:
    """(b, prefix + h * w) -> (b, h, w)"""
    return relevance[:, -grid[0] * grid[1] :].unflatten(1, grid)


def _paint_and_ask(model: Model, images: Tensor, cells: Tensor, classes: Tensor, sigmoid: bool) -> Tensor:
    """Images (b, c, height, width) or one for all cells, cells (b, h, w) to paint -> probabilities (b,)"""
    side = model.config.stride
    covered = cells.repeat_interleave(side, 1).repeat_interleave(side, 2)
    # A ResNet's last cells reach over the edge; pixels that fill no patch are not seen, and stay.
    height, width = images.shape[2:]
    covered = F.pad(covered, (0, max(width - covered.shape[2], 0), 0, max(height - covered.shape[1], 0)))
    colour = images.mean((2, 3), keepdim=True)
    painted = torch.where(covered[:, None, :height, :width], colour, images)
    return _probabilities(model(painted), classes.expand(len(painted)), sigmoid)


def _probabilities(logits: Tensor, classes: Tensor, sigmoid: bool) -> Tensor:
    """(b, k), (b,) -> (b,)"""
    exact = logits.float()
    chances = exact.sigmoid() if _alone(logits, sigmoid) else exact.softmax(1)
    return chances.gather(1, classes[:, None])[:, 0]


def _alone(logits: Tensor, sigmoid: bool) -> bool:
    """Whether each class is judged by its own logit; a single one shares with nobody, and its softmax says nothing."""
    return sigmoid or logits.shape[1] == 1


def _classes(model: Model, logits: Tensor, classes: Tensor | None) -> Tensor:
    """(b,) of int64: those asked for, else those with the largest logits"""
    if not model.config.classes:
        raise UserError("this model has no head, so no class to explain: load weights with one, or train one.")
    if classes is None:
        return logits.argmax(1)
    if classes.shape != logits.shape[:1] or classes.min() < 0 or classes.max() >= logits.shape[1]:
        raise UserError(f"classes must be one number from 0 to {logits.shape[1] - 1} for each of {len(logits)} images.")
    return classes.to(logits.device, torch.int64)


def _grid(model: Model, images: Tensor) -> Size:
    return model.config.grid((images.shape[2], images.shape[3]))
