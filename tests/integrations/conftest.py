"""Tests that need other packages are collected only in their environment (`make test-integrations`)."""

import sys
from importlib.util import find_spec
from pathlib import Path

from tests.rollout.environments.conftest import tokenizer  # noqa: F401

collect_ignore_glob = []
if find_spec("trl") is None:
    collect_ignore_glob += ["test_trl*.py", "test_verl*.py", "test_skyrl*.py", "test_environments.py"]
if not Path(sys.prefix, "verifiers").is_dir():  # `make test-verifiers` makes it
    collect_ignore_glob.append("test_verifiers.py")
