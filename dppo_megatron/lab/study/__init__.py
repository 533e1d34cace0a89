"""Implements `dppo-megatron study`, which trains a config with methods, conditions and seeds and tabulates the runs.

`grid` reads the study file and names every run. `runner` trains the runs that have no row yet. `rows` stores the rows,
`verdicts` computes intervals, and `study_report` writes tables and curves. See docs/study.md.
"""
