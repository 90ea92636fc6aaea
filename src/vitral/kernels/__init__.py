"""Faster ways to compute what plain PyTorch can, each beside that, and who chooses: kernels and CUDA graphs for a GPU,
packed weights for a CPU."""
