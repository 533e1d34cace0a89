"""Run a later node of a vLLM engine: workers without an HTTP server, as `vllm serve --headless` does.

`vllm serve` requires a distribution named vllm, and the CPU build has another name.
"""

from __future__ import annotations

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":  # spawned workers import this file too
    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)
