"""Serve with vLLM: a client of its HTTP server, the command that starts it, and the extension that it loads."""
