"""Implements `dppo-megatron study`: a grid of methods, conditions and seeds over one config, as one table of runs.

`grid` reads the study file and names every run. `runner` trains the runs that have no row yet. `rows` stores the rows,
`verdicts` computes their intervals, and `study_report` draws both. See docs/study.md.
"""
