"""Training: the only package that changes weights."""
