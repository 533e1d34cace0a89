"""Inference engines: the protocol that every engine answers to, and one folder for each kind of server."""
