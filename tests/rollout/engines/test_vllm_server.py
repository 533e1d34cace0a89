"""The command line of a vLLM server."""

import importlib
import warnings

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import engine_config
from tests.support.model_directories import write_model
from tests.support.models import CONFIGS


def test_the_servers_module_is_not_deprecated(tmp_path):
    command = KINDS["vllm"].command(engine_config(tmp_path / "model"), 8000, tmp_path / "model", 0, device="cuda")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = importlib.import_module(command[command.index("-m") + 1])
    assert callable(module.main)
    assert not [str(each.message) for each in found if "vllm.entrypoints" in str(each.message)]


@pytest.mark.parametrize(("device", "given"), [("cpu", True), ("cuda", False)])
def test_on_a_cpu_the_cache_is_no_share_of_all_memory(tmp_path, device, given):
    write_model(tmp_path / "model", CONFIGS["qwen3"])
    config = with_settings(engine_config(tmp_path / "model"), engine={"kv_cache_bytes": None})
    command = KINDS["vllm"].command(config, 8000, tmp_path / "model", 0, device=device)
    assert ("--kv-cache-memory-bytes" in command) == given


def test_stages_are_split_as_vllm_splits_them():
    utils = pytest.importorskip("vllm.distributed.utils", reason="needs vLLM")
    for layers, stages in ((61, 2), (61, 4), (30, 4), (48, 3), (7, 5)):
        bounds = [utils.get_pp_indices(layers, stage, stages) for stage in range(stages)]
        assert KINDS["vllm"].stage_layers(layers, stages) == [end - start for start, end in bounds]
