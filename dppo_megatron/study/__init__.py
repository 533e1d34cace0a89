"""`dppo-megatron study`: a grid of methods, conditions and seeds over one config, as one table of runs.

`grid` reads the study file and names every run, `runner` trains what has no row yet, `table` writes the rows,
`verdicts` puts intervals on them, `report` draws both. docs/study.md.
"""
