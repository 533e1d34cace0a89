"""Contains stand-ins for packages that vLLM imports and a machine without CUDA lacks."""
