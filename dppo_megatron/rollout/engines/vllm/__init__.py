"""Serve with vLLM: the client, the server command, and the extension that the server loads."""
