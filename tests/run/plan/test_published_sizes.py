"""Parameters of published models: counted in transformers' models, from config.json, and in the plan's ranks."""

import json
import math

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.common.hardware import hardware
from dppo_megatron.config import read_config
from dppo_megatron.run.plan import Cluster, make_plan
from tests.run.plan.test_plan import EXAMPLES
from tests.support.published import PUBLISHED

PARAMETERS = {
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.7": 352_797_829_024,
    "GLM-4.7-Flash": 29_943_393_920,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Kimi-K2-Instruct": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
PLANS = {  # example whose settings fit, and nodes of eight GPUs
    "Mistral-7B-Instruct-v0.3": ("qwen3_8b", 2),
    "GLM-4.7-Flash": ("qwen3_30b_a3b", 4),
    "GLM-4.5-Air": ("qwen3_30b_a3b", 4),
    "Qwen3.5-9B": ("qwen3_8b", 2),
    "Qwen3.5-35B-A3B": ("qwen3_30b_a3b", 4),
    "Kimi-K2-Instruct": ("deepseek_v3", 64),
    "gpt-oss-20b": ("qwen3_30b_a3b", 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weight_map_counts_the_parameters_that_transformers_builds(name):
    import transformers

    config = hf.parse_hf_config(PUBLISHED[name])
    model = getattr(transformers, config.architecture)
    given = {key: value for key, value in PUBLISHED[name].items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        built = model(model.config_class(**given)).state_dict()
    assert sum(tensor.numel() for tensor in built.values()) == PARAMETERS[name]
    assert sum(map(math.prod, hf.WeightMap(config).hf_tensors().values())) == PARAMETERS[name]


@pytest.mark.parametrize("name", [
    "Mistral-7B-Instruct-v0.3",
    "GLM-4.7-Flash",
    "Qwen3.5-9B",
    "gpt-oss-20b",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("GLM-4.5-Air", "Qwen3.5-35B-A3B", "Kimi-K2-Instruct")),
])  # fmt: skip
def test_plan_counts_the_ranks_that_it_builds(builder, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    example, nodes = PLANS[name]
    config = read_config(EXAMPLES / example / "config.yaml", [f"model.path={tmp_path}"])
    plan = make_plan(config, Cluster(nodes, 8, hardware("h200-141")), builder)
    assert plan.totals.parameters == PARAMETERS[name]
