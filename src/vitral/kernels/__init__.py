"""Fast implementations with their plain PyTorch references, and the dispatch between them: Triton kernels and CUDA
graphs for a GPU, packed weights for a CPU."""
