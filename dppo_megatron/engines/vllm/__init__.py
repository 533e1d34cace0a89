"""vLLM: a client of its HTTP server, the command line that starts it, and the extension that it loads."""
