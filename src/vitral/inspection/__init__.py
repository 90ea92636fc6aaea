"""Inspection of models: attention, attribution, learned representations and image search, as arrays."""
