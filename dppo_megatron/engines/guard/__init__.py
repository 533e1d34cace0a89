"""Protect every route of an engine's server.

Depends only on the standard library, because SGLang's own environment also runs it. This package is not installed
there, so `sglang_server` is started by its path.
"""
