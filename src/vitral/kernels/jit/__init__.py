"""The Triton kernels, under the names that a profiler shows. Their launchers and references are one folder up."""
