"""Studies of many runs: hyper-parameter sweeps, seeds, suites of tasks."""
