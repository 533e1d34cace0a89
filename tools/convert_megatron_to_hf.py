"""Run `dppo-megatron convert megatron-to-hf` as a script, with python, torchrun or srun."""

import sys

from dppo_megatron.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "megatron-to-hf"]
    main()
