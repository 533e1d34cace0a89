"""SGLang: a client of its HTTP server, the command line that starts it, and replacements for CPU kernels (`cpu`)."""
