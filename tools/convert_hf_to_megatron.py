"""Run `dppo-megatron convert hf-to-megatron` as a script, with python, torchrun or srun."""

import sys

from dppo_megatron.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-megatron"]
    main()
