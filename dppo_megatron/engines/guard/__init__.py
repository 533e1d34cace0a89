"""What stands before every route of an engine's server. Standard library alone, for SGLang's own environment runs it
too, where this package is not installed: `sglang_server` is started by its path."""
