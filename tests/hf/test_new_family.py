"""Adding a family takes two places: its `Family`, which would be a file in hf/families, and its line in the table."""

from pathlib import Path

import pytest

from dppo_megatron import hf
from dppo_megatron.hf.raw_config import RawConfig, Size
from tests.support.configs import make_config
from tests.support.fakes.chunk import fake_chunk, ranks
from tests.support.model_directories import same_weights
from tests.support.models import CONFIGS


class MadeUpConfig(RawConfig):
    """Experts in the last layers, under names of its own."""

    experts_from: int
    expert_count: Size
    experts_used: Size

    def experts(self) -> hf.MoEConfig:
        layers = tuple(layer >= self.experts_from for layer in range(self.num_hidden_layers))
        return hf.MoEConfig(self.expert_count, self.experts_used, self.intermediate_size, layers, True, "softmax")


FAMILY = hf.Family("made_up", "MadeUpForCausalLM", qkv_bias=True, qk_norm=True, raw=MadeUpConfig)
KEYS = {"experts_from": 2, "expert_count": 4, "experts_used": 2}
RAW = {**CONFIGS["llama"], **KEYS, "architectures": ["MadeUpForCausalLM"]}


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(hf.FAMILIES, FAMILY.name, FAMILY)
    hf.make_random_hf_model(tmp_path / "model", RAW, seed=1)
    return tmp_path / "model"


def test_its_config_is_read_and_refused_like_any_other(model):
    config = hf.read_hf_config(model)
    assert (config.family, config.qkv_bias, config.qk_norm) == ("made_up", True, True)
    assert config.moe.layers == (False, False, True, True)
    with pytest.raises(hf.ModelError) as error:
        hf.parse_hf_config({**RAW, "experts_from": None, "vocab_size": 0})
    assert error.value.problems == ("vocab_size = 0: must be at least 1", "experts_from: missing")


@pytest.mark.filterwarnings("ignore")  # Megatron's, at import
def test_the_trainer_builds_and_loads_and_saves_it(model, tmp_path):
    from dppo_megatron.train.actor.model_config import transformer_config

    run = make_config(model={"path": str(model), "dtype": "fp32"})
    config = hf.read_hf_config(model)
    chunk = fake_chunk(config)
    chunk.config = transformer_config(config, run)
    assert (chunk.config.add_qkv_bias, chunk.config.moe_layer_freq) == (True, [0, 0, 1, 1])
    hf.load_into([chunk], model, ranks=ranks())
    hf.save_hf([chunk], tmp_path / "saved", model, ranks=ranks())
    same_weights(model, tmp_path / "saved")
