"""The kernels themselves, in Triton's language, under the names that a profiler shows. What starts them, and what they
must compute, is one folder up."""
