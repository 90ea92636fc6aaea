"""Predictions of trained models: low-latency classification, results as CSV and JSON."""
