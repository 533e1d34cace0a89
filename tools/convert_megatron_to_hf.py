"""The same as `dppo-megatron convert megatron-to-hf`, for who looks for a script: python, torchrun or srun start it."""

import sys

from dppo_megatron.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "megatron-to-hf"]
    main()
