"""The script that puts our guard before a stock SGLang server."""

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dppo_megatron.rollout.engines import guard
from dppo_megatron.rollout.engines.guard.asgi import SECRET_VARIABLE

SECRET = "only this"


def test_sglang_s_own_requests_take_the_secret_past_proxies(monkeypatch):
    """http_proxy is common on compute nodes: a proxy would read the secret, and answer in the server's place."""
    monkeypatch.syspath_prepend(str(Path(guard.__file__).parent))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setattr(sys, "argv", ["server"])
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: None)
    server = ModuleType("http_server")
    server.app = SimpleNamespace(add_middleware=lambda *_, **__: None)
    plugins, entrypoints = ModuleType("sglang.srt.plugins"), ModuleType("sglang.srt.entrypoints")
    plugins.load_plugins, entrypoints.http_server = lambda: None, server
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), plugins, entrypoints):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    importlib.import_module("sglang_server").main(["--model-path", "m"])
    assert server.requests.headers["Authorization"] == f"Bearer {SECRET}"
    assert not server.requests.merge_environment_settings("http://node7:8000", {}, None, None, None)["proxies"]


@pytest.mark.parametrize(
    "argument", ["--grpc-port=1", "--grpc-po", "--tokenizer-w=2", "--enc", "--config", "--config=x"]
)
def test_arguments_of_other_doors_are_refused_however_short(monkeypatch, argument):
    """argparse accepts abbreviated arguments, and SGLang reads further arguments from a file."""
    monkeypatch.syspath_prepend(str(Path(guard.__file__).parent))
    with pytest.raises(SystemExit, match=f"{argument.partition('=')[0]}: .*engine.extra_args"):
        importlib.import_module("sglang_server").main(["--model-path", "m", argument])


def test_colocated_engines_without_the_package_that_frees_memory_say_so(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(guard.__file__).parent))
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)  # importing it raises ImportError
    with pytest.raises(SystemExit, match=f"{sys.executable} cannot import torch_memory_saver .*engine.placement"):
        importlib.import_module("sglang_server").main(["--model-path", "m", "--enable-memory-saver"])
