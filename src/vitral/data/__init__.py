"""Bytes to batches: decode, preprocess, order, load. Knows no model."""
