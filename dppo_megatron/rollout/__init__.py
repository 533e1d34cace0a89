"""Rollouts: the bank, the orchestrator, engine clients and engine extensions."""
