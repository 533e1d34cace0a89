"""The Triton backend in Triton's interpreter (see triton_cases.py), and the error without Triton."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dppo_megatron.vocab_parallel import token_statistics

HERE = Path(__file__).resolve().parent
# On a machine without a GPU the Makefile installs Triton apart: vLLM and inductor would take it for one.
APART = Path(sys.prefix) / "triton-interpreter"
MISSING = importlib.util.find_spec("triton") is None


@pytest.mark.slow
@pytest.mark.skipif(
    MISSING and not APART.exists(), reason=f"triton is not installed, nor in {APART}; `make install` puts it there"
)
def test_cases_in_the_interpreter() -> None:
    # A process of its own: Triton decides at import whether its functions are interpreted.
    paths = filter(None, (str(APART), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "triton_cases.py")]
    run = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    print(run.stdout[-200:])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available: the backend works here")
def test_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits, target = torch.zeros(2, 4), torch.tensor([0, 1])
    message = "needs the triton package" if MISSING else "needs CUDA tensors"
    with pytest.raises(ValueError, match=message):
        token_statistics(logits, target, backend="triton")
    token_statistics(logits, target, backend="auto")
