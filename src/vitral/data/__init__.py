"""From files to batches: decode, preprocess, order, load. Independent of models."""
