"""Measures the difference between engine and trainer, and finds the first operator that differs."""
