"""Protects every route of an engine's server. Only the standard library, because SGLang's own environment runs it too,
where this package is not installed: `sglang_server` is started by its path."""
