"""SGLang: a client of its HTTP server, the command line that starts it, and what its CPU build lacks (`cpu`)."""
