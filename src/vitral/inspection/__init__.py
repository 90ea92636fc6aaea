"""A plain model and images to arrays: where it looks, what it has learned, what an answer rests on."""
