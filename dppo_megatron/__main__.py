"""`dppo-megatron`, also as `python -m dppo_megatron`."""

import gc
import sys

# Imports allocate a million objects that stay. With the default of 700, collections take a fifth of their time.
GARBAGE_THRESHOLD = 10_000


def main() -> None:
    """Run a command. A missing package is an error that names the installation command."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        from .cli import main as run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "dppo_megatron").startswith("dppo_megatron"):
            raise
        sys.exit(f"no package {error.name}: pip install '.[cpu]' in the repository, or '.[gpu]', installs it")


if __name__ == "__main__":
    main()
