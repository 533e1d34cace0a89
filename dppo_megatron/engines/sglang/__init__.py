"""Serve with SGLang: a client of its server, the command that starts it, and replacements for CPU kernels (`cpu`)."""
