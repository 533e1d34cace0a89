"""A TransformerEngine that is installed but does not load: local layers work, and its error is reported elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.actor_cases import write_config

REASON = "Could not find shared object file for Transformer Engine torch lib"
RAISE = f"raise FileNotFoundError({REASON!r})\n"
SURVIVES = "try:\n    from . import pytorch\nexcept FileNotFoundError:\n    pass\n"
PROBLEMS = """
import json, sys
from pathlib import Path
from dppo_megatron.train.actor import check_model
from dppo_megatron.train.actor.model_config import _engine_problems
from dppo_megatron.train.actor.precision import installation_problems
from tests.support.actor_cases import actor_config

from megatron.core.extensions import transformer_engine
of = lambda layers, **model: actor_config(Path(sys.argv[1]), layers=layers, **model)
print(json.dumps({
    "local": check_model(of("local")),
    "transformer_engine": check_model(of("transformer_engine")),
    "auto": check_model(of("auto")),
    "auto on a GPU": _engine_problems(of("auto"), cuda=True),
    "fp8": check_model(of("auto", dtype="bf16", fp8="blockwise")),
    "fp8 on a GPU": installation_problems(of("auto", dtype="bf16", fp8="blockwise")),
}))
"""


@pytest.mark.parametrize("package", [pytest.param(SURVIVES, id="torch library"), pytest.param(RAISE, id="package")])
def test_local_layers_need_no_engine_that_loads(tmp_path, package):
    (tmp_path / "transformer_engine/pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").write_text(package)
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text(RAISE)
    model = write_config(tmp_path / "model")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", PROBLEMS, str(model)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    why = f"it is installed but does not load (FileNotFoundError: {REASON}); install it again for this torch"
    assert problems["local"] == problems["auto"] == []
    assert f"model.layers = transformer_engine: {why}, or set it to local" in problems["transformer_engine"]
    assert problems["auto on a GPU"] == [f"model.layers = auto: {why}, or set it to local"]
    assert problems["fp8"] == ["model.fp8 = blockwise: needs a CUDA device; set it to none"]
    assert problems["fp8 on a GPU"] == [f"model.fp8 = blockwise: needs TransformerEngine: {why}, or use none"]
