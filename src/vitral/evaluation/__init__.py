"""Evaluation of models: predictions and embeddings of a split, metrics, probes, duplicates."""
