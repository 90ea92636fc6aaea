"""A plain model and batches to numbers: predictions, accuracy, calibration, and whose classes are whose."""
