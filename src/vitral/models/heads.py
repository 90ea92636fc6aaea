"""What follows the encoder: attention pooling, and the heads of pre-training and fine-tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.models.init import lecun_normal, xavier_uniform
from vitral.models.layers import Mlp, Watcher


class Head(nn.Module):
    """Features to logits: a tanh layer where pre-training has one (section 3.1), then a zero linear layer."""

    def __init__(self, features: int, classes: int, representation: int = 0) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, representation) if representation else None
        self.output = nn.Linear(representation or features, classes) if classes else None
        if self.hidden is not None:
            lecun_normal(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        if self.output is not None:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    def represent(self, features: Tensor) -> Tensor:
        """(b, d) -> (b, r): what the last linear layer reads, Google's `pre_logits`."""
        return features if self.hidden is None else torch.tanh(self.hidden(features))

    def forward(self, features: Tensor) -> Tensor:
        """(b, d) -> (b, classes), or (b, r) without classes"""
        representation = self.represent(features)
        return representation if self.output is None else self.output(representation)


class MapPool(nn.Module):
    """Multi-head attention pooling: a learned query reads the patches, then an MLP (big_vision's MAP head)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.watchers: list[Watcher] = []
        xavier_uniform(self.probe)
        xavier_uniform(self.kv.weight, parts=2)
        for layer in (self.q, self.out):
            xavier_uniform(layer.weight)
        for layer in (self.q, self.kv, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, patches: Tensor) -> Tensor:
        """(b, n, d) -> (b, d)"""
        batch, n, width = patches.shape
        q = self.q(self.probe).view(1, 1, self.heads, -1).transpose(1, 2).expand(batch, -1, -1, -1)
        k, v = self.kv(patches).view(batch, n, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        read = F.scaled_dot_product_attention(q, k, v)
        for watcher in self.watchers:
            watcher.see(q, k, v, None, read)
        x = read.transpose(1, 2).reshape(batch, width)
        x = self.out(x)
        return x + self.mlp(self.norm(x))
