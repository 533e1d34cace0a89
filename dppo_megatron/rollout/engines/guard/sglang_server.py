"""Run a stock SGLang server behind our guard, with the arguments of `python -m sglang.launch_server`.

Start it with `python .../sglang_server.py ARGUMENTS`. SGLang's API key is a command-line argument that the server logs
and reports, and the key does not protect /health, /ready and /metrics. Here every route needs the secret from the
environment. Weights are loaded only from the run and the start model.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from asgi import SECRET_VARIABLE, Guard, roots_of_environment  # the file in this folder

OTHER_DOORS = ("--tokenizer-worker-num", "--grpc-port", "--grpc-mode", "--smg-grpc-mode", "--encoder-only", "--use-ray")
"""With these arguments a server also answers requests that bypass this process's application."""
ITS_FILE = "--config"  # names a file with more arguments
SLEEPS = "--enable-memory-saver"


def main(arguments: list[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0]
        # argparse accepts any unique prefix of an argument.
        if any(len(flag) > 2 and name.startswith(flag) for name in OTHER_DOORS):
            sys.exit(f"{flag}: opens a port that the run's secret does not guard; remove it (engine.extra_args)")
        if flag == ITS_FILE:
            sys.exit(f"{flag}: the arguments in its file are not checked; write them into engine.extra_args")
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false", "no"):
        sys.exit("SGLANG_RUST_SERVER: opens a port that the run's secret does not guard; unset it (engine.env)")

    if SLEEPS in arguments:
        _check_memory_saver()

    from sglang.srt.plugins import load_plugins

    load_plugins()  # must precede imports of modules that the plug-ins change
    import requests
    from sglang.srt.entrypoints import http_server

    secret = os.environ.get(SECRET_VARIABLE, "")
    start = arguments[arguments.index("--model-path") + 1]
    http_server.app.add_middleware(
        Guard,
        secret=secret,
        paths={"/update_weights_from_disk": "model_path", "/load_lora_adapter": "lora_path"},
        roots=(*roots_of_environment(), start),
    )
    # The server warms up with requests to its routes. These requests need the secret too.
    session: Any = requests.Session()
    session.trust_env = False  # a proxy in the environment would receive the secret, and ~/.netrc would replace it
    session.headers["Authorization"] = f"Bearer {secret}"
    session.exceptions = requests.exceptions
    http_server.requests = session
    sys.argv[1:] = arguments
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _check_memory_saver() -> None:
    """Exit with a single message if torch_memory_saver cannot be imported.

    Only runs with colocated engines need it. Without this check an SGLang process would exit later and hide the cause
    among other messages.
    """
    try:
        import torch_memory_saver  # noqa: F401
    except (ImportError, OSError) as error:
        sys.exit(
            f"{SLEEPS}: {sys.executable} cannot import torch_memory_saver ({error}), without which SGLang gives no "
            "memory back to the trainer (engine.placement = colocated); install it there (torch-memory-saver), set "
            "engine.python to an interpreter that has it, set engine.kind to vllm, or give the engines GPUs of "
            "their own"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
