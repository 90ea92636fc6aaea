"""The kernels themselves, in Triton's language: what starts them, and what they must compute, is one folder up."""
