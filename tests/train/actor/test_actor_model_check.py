"""`check_model`: every reason at once, before anything is started."""

import pytest

from dppo_megatron.hf import padded_vocab_size
from dppo_megatron.train.actor import LayoutError, check_model, init_layout
from tests.support.actor_cases import DEEPSEEK, OSS, QWEN3_5, QWEN3_MOE, YARN, actor_config, write_config


def test_a_model_that_fits(tmp_path):
    assert check_model(actor_config(write_config(tmp_path), parallel={"tensor": 2, "world_size": 2})) == []


@pytest.mark.parametrize(
    ("changes", "parallel", "settings", "expected"),
    [
        ({}, {"tensor": 4, "world_size": 4}, {}, ["does not divide 2 key-value heads; use one of 1, 2"]),
        (
            {"intermediate_size": 51},
            {"tensor": 4, "world_size": 4, "pipeline": 3},
            {},
            ["2 key-value heads", "51 columns of intermediate_size", "3 stages do not divide 4 layers"],
        ),
        ({}, {"pipeline": 2, "virtual_pipeline": 4, "world_size": 2}, {}, ["8 stages do not divide 4 layers"]),
        (
            {},
            {"expert": 2, "world_size": 2, "expert_tensor": 2},
            {},
            ["expert = 2: the model has no experts", "expert_tensor = 2: the model has no experts"],
        ),
        (
            {"num_hidden_layers": 61},
            {"pipeline": 16, "last_stage_layers": 2, "virtual_pipeline": 4, "world_size": 16},
            {},
            ["last_stage_layers = 2: 4 virtual stages", "60 stages do not divide 59 layers"],
        ),
        (
            {},
            {"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 4, "world_size": 2},
            {},
            ["first_stage_layers + parallel.last_stage_layers = 2 + 4"],
        ),
        (
            {**QWEN3_MOE, "num_experts": 9, "moe_intermediate_size": 25},
            {"expert": 2, "tensor": 2, "pipeline": 2, "expert_dispatcher": "allgather", "world_size": 8},
            {},
            [
                "does not divide 9 experts; use one of 1, 3, 9",
                "moe_intermediate_size = 25",
                "parallel.sequence = false",
                "expert_dispatcher = allgather",
            ],
        ),
        ({**QWEN3_MOE, "num_experts_per_tok": 1}, {}, {}, ["norm_topk_prob = true: with one expert"]),
        (
            {
                **DEEPSEEK,
                "topk_group": 3,
                "norm_topk_prob": False,
                "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0, "truncate": False},
            },
            {},
            {},
            ["norm_topk_prob = false", "topk_group = 3", "truncate = False", "mscale = 0.7"],
        ),
        (
            OSS,
            {"tensor": 2, "sequence": True, "world_size": 2},
            {},
            ["parallel.expert_tensor = 2: Megatron-core does not"],
        ),
        (OSS, {}, {"layers": "transformer_engine"}, ["attention sinks are not implemented with TransformerEngine"]),
        (
            OSS,
            {},
            {"lora": {"r": 4, "targets": ["q_proj"]}},
            ["model.lora.r = 4: not implemented for layers with biases"],
        ),
        (QWEN3_5, {"context": 2, "world_size": 2}, {}, ["parallel.context = 2: gated delta net needs whole sequences"]),
        (QWEN3_5, {"tensor": 4, "world_size": 4}, {}, ["2 key heads of gated delta net; use one of 1, 2"]),
        (QWEN3_5, {}, {"layers": "transformer_engine"}, ["gated delta net is not implemented with TransformerEngine"]),
        ({}, {}, {"layers": "transformer_engine"}, ["needs a CUDA device"]),
        ({"architectures": ["FooForCausalLM"]}, {}, {}, ["FooForCausalLM", "Qwen3ForCausalLM"]),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, {}, ["quantised weights"]),
    ],
)
def test_every_problem_is_named(tmp_path, changes, parallel, settings, expected):
    problems = check_model(actor_config(write_config(tmp_path, **changes), parallel=parallel, **settings))
    for text in expected:
        assert any(text in problem for problem in problems), problems
    assert all(" = " in problem and ": " in problem for problem in problems)


def test_uneven_stages_that_fit(tmp_path):
    """DeepSeek-V3 has 61 layers."""
    parallel = {"pipeline": 16, "last_stage_layers": 1, "world_size": 16}
    assert check_model(actor_config(write_config(tmp_path, num_hidden_layers=61), parallel=parallel)) == []


def test_routing_replay_needs_experts(tmp_path):
    config = actor_config(write_config(tmp_path), sections={"rollout": {"routing_replay": True}})
    assert check_model(config) == ["rollout.routing_replay = true: the model has no experts to replay; set it to false"]


def test_missing_directory_and_foreign_files(tmp_path):
    (missing,) = check_model(actor_config(tmp_path / "nowhere"))
    assert "no such directory" in missing
    assert "model.path" in missing
    (foreign,) = check_model(actor_config(tmp_path))
    assert "config.json" in foreign


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [(32, 2, 32), (37, 2, 38), (37, 1, 37), (151936, 1, 151936), (151936, 2, 152064), (151936, 8, 152576)],
)
def test_padded_vocabulary(vocab, tensor, padded):
    assert padded_vocab_size(vocab, tensor) == padded


def test_processes_that_do_not_fit_the_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match=r"parallel.world_size = 2: 3 trainer processes"):
        init_layout(actor_config(tmp_path, parallel={"world_size": 2}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LayoutError, match="RANK is set, MASTER_ADDR, MASTER_PORT not; start ranks by torchrun or srun"):
        init_layout(actor_config(tmp_path))


@pytest.mark.megatron_next
def test_a_whole_linear_layer_where_megatron_leaves_its_name_out(monkeypatch):
    """Megatron-core from 0.17 on has no such name without TransformerEngine."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention

    from dppo_megatron.train.actor import megatron_version

    monkeypatch.setattr(multi_latent_attention, "Linear", None)
    assert megatron_version.replicated_linear() is Linear is multi_latent_attention.Linear
