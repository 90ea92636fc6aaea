"""A trained model at work: predictions that people and programs read."""
