"""Training: the only room that changes weights."""
