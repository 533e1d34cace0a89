"""Inference engines: the protocol of all clients, and one folder for each kind of server."""
