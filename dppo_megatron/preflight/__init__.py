"""Checks that only the nodes of a run can answer, in seconds and before a model loads; every failure names its node."""
