"""`python -m dppo_megatron` is `dppo-megatron`."""

from .cli import main

if __name__ == "__main__":
    main()
