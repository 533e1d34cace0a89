"""Contradictory settings are rejected, each with one sentence that names the setting to change."""

import json
import sys
import types
from typing import Any

import pytest
import torch

from dppo_megatron.config import Config
from dppo_megatron.config.load import _apply_overrides
from dppo_megatron.hf import parse_hf_config
from dppo_megatron.objectives import Objective, ObjectiveSettings
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.run.checks import engine as engine_rules
from dppo_megatron.run.checks import exact, settings_problems, user_code
from tests.support.actor_cases import DEEPSEEK, GPT_OSS, GPT_OSS_SERVED, OSS, QWEN3, QWEN3_5, QWEN3_MOE
from tests.support.configs import make_config


def config(settings: str) -> Config:
    """Return a valid config with settings such as "engine.exact=true model.lora.r=8"."""
    sections: dict[str, Any] = {}
    assert not [*_apply_overrides(sections, settings.split())]
    return make_config(**sections)


def terms(*terms: dict[str, Any]) -> str:
    return f"reward.terms={json.dumps(terms, separators=(',', ':'))}"


EXACT = "engine.exact=true engine.dtype=bf16 "
DRAFTS = "engine.draft_tokens=4 "
LORA = "model.lora.r=8 "
ADAPTER = LORA + "weight_sync.lora=adapter "
BROADCAST = "weight_sync.transport=broadcast "
COLOCATED = "engine.placement=colocated "
IN_MEMORY = "weight_sync.directory=/dev/shm/mine "
DYNAMIC = "rollout.dynamic_sampling=true "
HELD_OUT = "data.eval=held_out.jsonl "
AIME = "eval.sets.aime.path=a.jsonl eval.sets.aime.n=4 eval.sets.aime.temperature=0.7 eval.sets.aime.top_p=0.95 "
AIME += "eval.sets.aime."


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("", None),
        (EXACT, None),
        (EXACT + "parallel.tensor=2 parallel.world_size=2 parallel.sequence=true", None),
        (EXACT + "engine.kind=sglang engine.dtype=fp32 model.dtype=fp32", None),
        (EXACT + "model.fp32_head=true", None),
        (EXACT + "engine.dtype=fp32", "set engine.dtype (now fp32) to bf16"),
        (EXACT + "engine.quantization=fp8_block_emulated", "set engine.quantization and model.fp8 to none"),
        (EXACT + "model.layers=transformer_engine", "set model.layers to local or auto"),
        (EXACT + "model.logits=fused", "set model.logits to stored"),
        (EXACT + "model.lora.r=4", "set model.lora.r to 0"),
        (EXACT + "model.batch_invariant_head=true", "set model.batch_invariant_head to false"),
        (EXACT + "engine.tensor_parallel=2", "set engine.tensor_parallel to 1"),
        (EXACT + "parallel.tensor=4 parallel.world_size=4", "set parallel.tensor (now 4) to 1 or 2"),
        (EXACT + "parallel.context=2 parallel.world_size=2", "set parallel.context to 1"),
        (EXACT + "rollout.top_p=0.9 rollout.top_k=8", "top_k and min_p to 1, -1 and 0"),
        (DRAFTS, None),
        (DRAFTS + "rollout.top_k=50", "sampling masks of drafted positions are not recorded"),
        (DRAFTS + "rollout.routing_replay=true", "the experts of drafted positions are not recorded"),
        (DRAFTS + ADAPTER, "it is not tested with adapters"),
        (DRAFTS + "engine.tensor_parallel=2", "it is not tested on several devices of one engine (now 2)"),
        (DRAFTS + "engine.kind=sglang", "with drafts SGLang samples other tokens for a seed"),
        ("engine.extra_args=[--speculative-config=x]", "engine.extra_args = --speculative-config=x: a server's own"),
        ("engine.kind=sglang engine.extra_args=[--speculative-algorithm=NGRAM]", "changes the tokens of a seed"),
        ('engine.extra_args=["--swap-space\\t8"]', "one entry has an option and its value; write [--swap-space, 8]"),
        (LORA, None),
        (ADAPTER, None),
        (ADAPTER + "model.lora.r=0", "the run trains no adapters (model.lora.r = 0)"),
        (ADAPTER + "model.lora.r=1024", "engines take adapters of r at most 512"),
        (ADAPTER + "engine.kind=sglang", None),
        (ADAPTER + "engine.quantization=fp8_block", "FP8 weights are made at each publish"),
        (ADAPTER + COLOCATED, "release their weights"),
        (ADAPTER + BROADCAST, "adapters are sent as files"),
        (ADAPTER + "model.weights=other", "the trainer from model.weights"),
        (ADAPTER + "weight_sync.full_every=2", "adapters are published as they are"),
        (LORA + "model.layers=transformer_engine", "adapters need Megatron's local layers"),
        (LORA + "model.fp8=tensorwise", "model.lora.r = 8: local layers have no FP8; set model.fp8 to none"),
        (LORA + "weight_sync.full_every=2", None),
        ("weight_sync.full_every=2 " + COLOCATED, "it has released its device"),
        ("weight_sync.full_every=5 " + BROADCAST, "weight_sync.full_every = 5: a broadcast always sends all weights"),
        (COLOCATED + "engine.kind=sglang rollout.max_staleness=0", None),
        (COLOCATED + "engine.kind=sglang " + BROADCAST, "broadcast: NCCL does not connect two processes on one GPU"),
        (IN_MEMORY + BROADCAST, "weight_sync.directory = '/dev/shm/mine': a broadcast writes no files"),
        (IN_MEMORY + "slurm.trainer_nodes=1 slurm.engine_nodes=1", "each machine has its own /dev/shm, but the run"),
        (IN_MEMORY + "weight_sync.full_every=5", None),
        (IN_MEMORY + COLOCATED, None),
        ("weight_sync.directory=/shared/mine slurm.engine_nodes=1", None),
        ("objective.advantage=batch_mean", None),
        (DYNAMIC + "rollout.bank=bank", "rollout.dynamic_sampling = True: the run samples no rollouts of its own"),
        (DYNAMIC + "objective.advantage=batch_mean", "objective.advantage = batch_mean uses"),
        (AIME + "temperature=0 eval.sets.aime.top_p=1", "eval.sets.aime.n = 4: with eval.sets.aime.temperature = 0"),
        (AIME + "temperature=0 eval.sets.aime.n=1", "eval.sets.aime.top_p = 0.95: greedy answers"),
        (AIME + "temperature=0.001", "eval.sets.aime.temperature = 0.001: vLLM raises it"),
        (AIME + "n=4 engine.kind=sglang", "eval.sets.aime.top_p = 0.95: SGLang would then ignore"),
        (AIME + "max_response_tokens=4000 engine.max_model_len=4096", "eval.sets.aime.max_response_tokens = 4000, so"),
        (AIME + "reward.overlong_buffer=5", "eval.sets.aime.reward.overlong_buffer = 5"),
        ("rollout.top_k=1", "rollout.top_k = 1, top_p = 1, min_p = 0: keep only the most likely token"),
        ("rollout.top_k=20 rollout.top_p=0.05", "all samples of a group are equal"),
        ("rollout.top_k=20 rollout.min_p=1", "all samples of a group are equal"),
        ("rollout.top_k=20 rollout.top_p=0.06", None),
        ("rollout.max_response_tokens=1 objective.horizon=1000000000 reward.overlong_buffer=1", None),
        ("data.eval=./unused.jsonl", "data.eval = unused.jsonl: the run trains on this file"),
        ('data.eval=./more data.more=[{"path":"more"}]', "data.eval = more: the run trains on this file"),
        ("eval.sets.aime.path=x/../unused.jsonl", "eval.sets.aime.path = x/../unused.jsonl: the run trains on this"),
        ("data.eval=unused.jsonl environment.name=my:Game", None),
        (HELD_OUT + "eval.pass_reward=1.5", "eval.pass_reward = 1.5: rewards are 0 to 1, so either no answer or all"),
        (HELD_OUT + "eval.pass_reward=0", "eval.pass_reward = 0: rewards are 0 to 1"),
        (HELD_OUT + "eval.pass_reward=0 reward.name=dapo", None),
        (HELD_OUT + "eval.pass_reward=5 reward.name=my:reward", None),
        (HELD_OUT + "eval.pass_reward=5 reward.name=http", None),
        (HELD_OUT + terms({"name": "exact", "weight": 0.5}, {"name": "regex", "weight": 0.4}), "are 0 to 0.9"),
        (HELD_OUT + terms({"name": "exact", "weight": 0.5}, {"name": "regex", "weight": 0.5}), None),
        (
            HELD_OUT + terms(*({"name": "exact", "weight": 0.5, "sources": [source]} for source in "ab")),
            "rewards are 0 to 0.5",
        ),
        (
            HELD_OUT + "eval.pass_reward=-0.5 " + terms({"name": "exact", "weight": -1}, {"name": "m:f", "weight": 0}),
            None,
        ),
        (AIME + "pass_reward=2", "eval.sets.aime.pass_reward = 2: rewards are 0 to 1"),
        (AIME + "pass_reward=2 eval.sets.aime.reward.name=my:reward", None),
        ("weight_sync.fingerprint=false weight_sync.probe_tolerance=1000", "no check would notice wrong weights"),
        ("weight_sync.fingerprint=false engine.quantization=fp8_block", None),
        ("weight_sync.probe_tolerance=1000", None),
        ("optimizer.warmup_updates=7 train.steps=3 train.updates_per_step=2", "longer than the run of 6 updates"),
        ("optimizer.warmup_updates=6 train.steps=3 train.updates_per_step=2", None),
        (
            "optimizer.warmup_updates=3 train.steps=3 optimizer.decay=linear",
            "longer than the 3 updates until the decay ends, and the last one must decay; lower it",
        ),
        (
            "optimizer.warmup_updates=2 train.steps=9 optimizer.decay=linear optimizer.decay_steps=2 "
            "optimizer.min_lr=1e-7",
            "longer than the 2 updates until the decay ends",
        ),
        (
            "train.steps=9 optimizer.decay=linear optimizer.decay_steps=2",
            "optimizer.decay_steps = 2: less than train.steps = 9, and the learning rate is 0 in the steps after it",
        ),
        ("train.steps=9 optimizer.decay=linear optimizer.decay_steps=2 optimizer.min_lr=1e-7", None),
        ("train.steps=9 optimizer.decay=linear optimizer.decay_steps=20", None),
        ("optimizer.warmup_updates=2 train.steps=3 optimizer.decay=cosine", None),
        ("optimizer.decay=linear train.steps=1", None),
        ("optimizer.min_lr=1e-6 optimizer.decay=linear", "optimizer.min_lr = 1e-06: not below optimizer.lr = 1e-06"),
        (
            "model.lora.adapter=a",
            "model.lora.adapter = 'a': model.lora.r = 0 trains all weights and no adapter, so it has",
        ),
        ("reward.name=gsm8k " + terms({"name": "exact"}), "reward.name = 'gsm8k': reward.terms replace it"),
        ("reward.settings.case=true " + terms({"name": "exact"}), "reward.settings.case = True: each of reward.terms"),
        (terms({"name": "exact", "weight": 0}), "reward.terms: all weights are 0, so every reward is 0"),
        (
            "objective.horizon=9 objective.aggregation=token_mean",
            "objective.horizon = 9: needs seq_mean_token_sum_norm",
        ),
        ("profile.memory=true", "profile.steps is empty"),
        ("eval.pass_reward=0.5", "only data.eval uses it"),
        ("environment.max_turns=3", "neither environment.name nor environment.agent is set"),
        ("environment.name=my:Game environment.host=::1", "environment.host = '::1': needs environment.agent"),
        *(
            (f"acceptance.bound={bound} {settings}", None if bound < 1 else "a total variation is at most 1")
            for bound in (0.99, 1, 2.5)
            for settings in (
                "",
                "objective.name=dppo_topk_tv rollout.topk_logprobs=4",
                "objective.name=pg_is acceptance.divergence=binary_tv",
                "objective.name=dppo_binary_kl objective.settings.divergence=binary_tv",
                "objective.name=my_code:objective acceptance.divergence=binary_tv",
            )
        ),
        *(
            (f"acceptance.bound=2 {settings}", None)
            for settings in (
                "objective.name=dppo_binary_kl",
                "objective.name=grpo",
                "objective.name=my_code:objective",
                "acceptance.divergence=binary_kl",
            )
        ),
        ('engine.urls=["http://a:1","http://a:1"]', "each must be another server; remove the repeated one"),
        ("optimizer.min_lr=1e-7", "optimizer.min_lr = 1e-07: optimizer.decay = constant never reaches it"),
        ("optimizer.min_lr=1e-7 optimizer.decay=linear", None),
        ("profile.steps=[3,4] train.steps=3", "profile.steps = [4]: the run has only train.steps = 3"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, problem):
    problems = settings_problems(config(settings))
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


@pytest.mark.parametrize(("model", "refused"), [(QWEN3, False), (QWEN3_MOE, True), (DEEPSEEK, True), (QWEN3_5, True)])
def test_engines_take_only_adapters_of_dense_models(model, refused):
    short, hf = " data.max_prompt_tokens=32 rollout.max_response_tokens=32", parse_hf_config(model, "x")
    found = engine_rules.model_problems(config(ADAPTER + short), hf)
    assert any("adapters of experts or of latent attention" in problem for problem in found) == refused
    assert not [*engine_rules.model_problems(config(LORA + short), hf)]


@pytest.mark.parametrize(
    ("targets", "lost"),
    [
        ("[q_proj,v_proj,o_proj]", False),
        ("[gate_proj,down_proj]", False),
        ("[q_proj,k_proj]", True),
        ("[v_proj]", True),
        ("[k_proj]", True),
        ("[q_proj,v_proj,up_proj]", True),
        ("[q_proj,layers.0.self_attn.v_proj]", True),
    ],
)
def test_parts_of_fused_layers_that_sglang_would_not_take_are_refused(targets, lost):
    for kind in ("vllm", "sglang"):
        made = config(f"{ADAPTER} model.lora.targets={targets} engine.max_model_len=64 engine.kind={kind}")
        found = engine_rules.model_problems(made, parse_hf_config(QWEN3, "x"))
        assert any("SGLang's fused layers need" in problem for problem in found) == (lost and kind == "sglang")


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({}, "", None),
        (OSS, "rollout.bank=b", None),
        ({}, "engine.kind=sglang", "engine.kind = sglang: weight updates of gpt-oss are not tested"),
        ({}, "engine.quantization=fp8_block_emulated", "fp8_block_emulated: not supported for gpt-oss"),
        ({}, "engine.draft_tokens=4", "not tested with attention sinks"),
        ({"swiglu_limit": 0.7}, "", "swiglu_limit = 7"),
        ({"rms_norm_eps": 1e-6}, "", "rms_norm_eps = 1e-5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}, "", "rope_type = yarn"),
        ({"rope_parameters": {**GPT_OSS["rope_parameters"], "attention_factor": 2.0}}, "", "without attention_factor"),
        ({"tie_word_embeddings": True}, "", "tie_word_embeddings = false"),
        ({"layer_types": ["full_attention"] * 4}, "", "sliding_attention as every other"),
    ],
)
def test_gpt_oss_that_engines_would_compute_in_another_way_is_refused(changes, settings, problem):
    hf = parse_hf_config({**QWEN3, **GPT_OSS_SERVED, **changes}, "x")
    short = "engine.max_model_len=64 data.max_prompt_tokens=32 rollout.max_response_tokens=32 "
    found = [*engine_rules.model_problems(config(short + settings), hf)]
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


@pytest.mark.parametrize(
    ("model", "dtype", "problem"),
    [
        ({**QWEN3, **GPT_OSS_SERVED}, "fp16", "a copy of the first sinks"),
        ({**QWEN3, **GPT_OSS_SERVED}, "bf16", None),
        (QWEN3_5, "fp32", "computes in bf16 only"),
        (QWEN3, "fp16", None),
    ],
)
def test_dtypes_that_vllm_computes_wrongly_on_cpus_are_refused(tmp_path, model, dtype, problem):
    (tmp_path / "config.json").write_text(json.dumps(model))
    made = config(f"model.path={tmp_path} engine.dtype={dtype}")
    found = KINDS["vllm"].cpu_problems(made)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.mark.parametrize(
    "kl", ["", "objective.settings.reference_kl=k3 objective.settings.reference_kl_coefficient=0.1"]
)
def test_the_reference_policy_must_be_the_start_of_training(kl):
    found = user_code.objective_problems(config(f"{LORA} model.lora.adapter=other {kl}"), [])
    assert any("model.lora.adapter = other: the reference of" in problem for problem in found) == bool(kl)
    assert user_code.objective_problems(config(LORA + kl), []) == []


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (("topk_id",), "'topk_id' is no column of a batch: did you mean 'topk_ids'?"),
        ("rollout_logprob", "write a tuple of names"),
        (("entropy",), "'entropy' is an input of the call; remove it here, or give the column another name"),
        (("teacher_logprob",), None),
    ],
)
def test_an_objective_needs_columns_that_exist(monkeypatch, columns, problem):
    module = types.ModuleType("reads_a_column")
    kind = type("Reads", (Objective,), {"needs_columns": columns})
    module.reads = kind("reads", ObjectiveSettings(delta=0.15))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = user_code.objective_problems(config("objective.name=reads_a_column:reads"), [])
    assert [text for text in found if "needs_columns" in text] == (
        [] if problem is None else [f"objective.name = reads_a_column:reads: needs_columns = {columns!r}: {problem}"]
    )


def of_model(model: dict, settings: str = EXACT, *, elsewhere: bool = False) -> list[str]:
    return exact.model_problems(config(settings), parse_hf_config(model, "x"), elsewhere=elsewhere)


def test_models_and_gpus_without_operators_that_both_sides_share_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert of_model(QWEN3) == []
    assert "the router, the experts' products" in of_model(QWEN3_MOE)[0]
    assert "latent attention" in of_model(DEEPSEEK)[-1]
    assert "gated delta net" in of_model(QWEN3_5)[-1]
    assert "run without GPUs" in of_model(QWEN3, EXACT + "slurm.gpus_per_node=8", elsewhere=True)[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "run without GPUs" in of_model(QWEN3)[0]
    assert of_model(QWEN3, EXACT + "slurm.gpus_per_node=0", elsewhere=True) == []
    assert of_model(QWEN3_MOE, "") == []
