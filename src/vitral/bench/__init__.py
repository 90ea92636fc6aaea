"""Speed benchmarks: every library in its own worker process, alternating, after a parity check of vitral's outputs."""
