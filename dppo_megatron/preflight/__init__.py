"""Checks that need the nodes of a run, in seconds and before a model loads. Every failure names its node."""
