"""GPU kernels, each beside what it must compute in plain PyTorch, and who chooses between the two."""
