"""`dppo-megatron`, also as `python -m dppo_megatron`."""

import sys


def main() -> None:
    """Run a command. A missing package is an error that names the installation command."""
    try:
        from .cli import main as run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "dppo_megatron").startswith("dppo_megatron"):
            raise
        sys.exit(f"no package {error.name}: pip install '.[cpu]' in the repository, or '.[gpu]', installs it")


if __name__ == "__main__":
    main()
