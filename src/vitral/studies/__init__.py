"""Many runs to one table: sweeps, seeds, suites of tasks."""
