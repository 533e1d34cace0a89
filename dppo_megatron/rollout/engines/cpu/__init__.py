"""Contains modules that servers on a machine without CUDA import by file name: PYTHONPATH names this directory."""
