"""Serve with SGLang: the client, the server command, and replacements for CPU kernels (`cpu`)."""
