"""The same as `dppo-megatron convert hf-to-megatron`, for who looks for a script: python, torchrun or srun start it."""

import sys

from dppo_megatron.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-megatron"]
    main()
