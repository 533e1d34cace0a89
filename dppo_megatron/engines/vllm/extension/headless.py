"""Runs a node of a vLLM engine other than its first: workers without an HTTP server, as `vllm serve --headless` does.

`vllm serve` itself requires a distribution named vllm, and the CPU build has another name.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
