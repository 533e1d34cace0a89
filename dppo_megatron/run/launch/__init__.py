"""Starts, watches and ends the processes of a run: the driver, and a run on this machine."""
