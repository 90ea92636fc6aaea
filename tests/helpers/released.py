"""The released ViT-Ti/16 among the assets, and its preprocessing."""

WEIGHTS = "data/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
PREPROCESS = "decode|resize_small(248, bicubic)|central_crop(224)|value_range(-1, 1)"
