"""Protect every route of an engine server.

Depends only on the standard library, because the SGLang environment also runs it. This package is not installed there,
so `sglang_server` is started by path.
"""
