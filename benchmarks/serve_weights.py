"""Random weights of a model with 1,000 classes, in timm's layout, for `serve_load.py`.

    python benchmarks/serve_weights.py ViT-B/16 vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors

The preprocessing follows from the file's name.
"""

import sys

import torch

import vitral

if __name__ == "__main__":
    torch.manual_seed(0)
    model = vitral.create(sys.argv[1], classes=1000, gelu="erf")
    for parameter in model.head.parameters():  # a new head has zeros, and names one class for all images
        torch.nn.init.normal_(parameter, std=0.05)
    vitral.save(model, sys.argv[2], format="timm")
