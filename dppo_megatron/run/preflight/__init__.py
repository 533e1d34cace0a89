"""Checks a run's nodes in seconds, before a model loads. A failure names the faulty node if it is known."""
