"""Speed benchmarks: every library in its own worker process, timed in turns, after a parity check of our outputs."""
