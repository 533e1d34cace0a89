"""Modules that servers on a machine without CUDA import by their file name, because PYTHONPATH names this directory."""
