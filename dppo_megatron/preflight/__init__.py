"""Checks the nodes of a run in seconds, before a model loads. Every failure names its node."""
