"""The order of the steps of a weight update, and the state after a step that fails, with a fake engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm", reason="needs vLLM")

from dppo_megatron.rollout.engines.vllm.extension.bodies import parse
from dppo_megatron.rollout.engines.vllm.extension.routes import DppoRoutes
from dppo_megatron.rollout.engines.vllm.extension.weights import WeightsInconsistent, WeightUpdater
from dppo_megatron.rollout.engines.vllm.extension.worker import WorkerExtension
from dppo_megatron.weights.broadcast_plan import TensorSpec, WeightGroupPlan
from dppo_megatron.weights.manifest import BadWeights


class FakeEngine:
    """Records the calls; raises at the one named `fails_at`."""

    def __init__(self, fails_at: str = ""):
        self.calls: list[str] = []
        self.fails_at = fails_at

    def _record(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] == self.fails_at:
            raise RuntimeError("out of memory")

    async def pause_generation(self, *, mode, clear_cache=True):
        self._record(f"pause {mode}")

    async def resume_generation(self):
        self._record("resume")

    async def sleep(self, level, mode):
        self._record(f"sleep {level} {mode}")

    async def wake_up(self):
        self._record("wake")

    async def collective_rpc(self, method, args):
        """Answer as two workers, the second of which returns the error."""
        (info,) = args
        what = {"dppo_join_weight_group": "join", "dppo_update_weights": "update"}[method]
        try:
            of = info.get("step") or info.get("name") or len(list(Path(info["directory"]).glob("*.safetensors")))
            self._record(f"{what} {of}")
        except RuntimeError as error:
            return [None, str(error)]
        return [None, None]

    async def update_weight_version(self, version):
        self._record(f"version {version}")

    async def reset_prefix_cache(self, reset_running_requests=False):
        self._record(f"reset {reset_running_requests}")
        return True


CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
    **{"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False},
}


def make_policy(directory, *more):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: np.zeros((2, 3), np.float32) for name in ("w", *more)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def policy(tmp_path):
    return make_policy(tmp_path)


def load(updater, policy, mode="keep", wait_s=5.0, version=4):
    return updater.load(policy, version, mode, wait_s)


async def test_order(policy):
    engine = FakeEngine()
    updater = WeightUpdater(engine, policy)
    await load(updater, policy)
    await load(updater, policy, "abort", version=5)
    assert engine.calls == [
        *("pause keep", "update 1", "version 4", "reset True", "resume"),
        *("pause abort", "update 1", "version 5", "reset False", "resume"),
    ]


def plan(name="group", **shapes):
    specs = tuple(TensorSpec(n, "float32", shape) for n, shape in ({"w": (2, 3)} | shapes).items())
    return WeightGroupPlan(name, "127.0.0.1", 1, "gloo", 5.0, 1, ((specs,),))


async def test_order_of_a_broadcast(policy):
    engine = FakeEngine()
    updater = WeightUpdater(engine, policy)
    await updater.join(plan())
    assert updater.group == "group"
    await updater.receive("group", "step-1", 4, "keep", 5.0)
    steps = ["join group", "pause keep", "update step-1", "version 4", "reset True", "resume"]
    assert engine.calls == steps


def test_a_policy_may_omit_weights_that_the_model_does_not_need(tmp_path):
    """The trainer publishes neither further-token layers nor rotary tables, which start models may have."""
    start = make_policy(
        tmp_path / "start", "model.layers.2.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    )
    asyncio.run(load(WeightUpdater(FakeEngine(), start), make_policy(tmp_path / "published")))


def test_a_group_of_another_model_is_refused_before_anybody_waits(policy):
    engine = FakeEngine()
    updater = WeightUpdater(engine, policy)
    with pytest.raises(BadWeights, match=r"1 unknown tensors \(v\)"):
        asyncio.run(updater.join(plan(v=(4,))))
    assert (engine.calls, updater.group) == ([], "")


def test_the_route_takes_the_whole_plan_as_the_trainer_writes_it():
    sent = replace(plan(), nccl="2.27.3", nccl_cumem="0", host="10.0.0.7", first_worker=4)
    assert parse(WeightGroupPlan, json.dumps(sent.to_json()).encode()) == sent


def test_a_group_over_another_nccl_is_refused_before_anybody_waits(policy, monkeypatch):
    monkeypatch.setattr("dppo_megatron.weights.process_group.nccl_version", lambda: "2.21.5")
    updater = WeightUpdater(FakeEngine(), policy)
    with pytest.raises(BadWeights, match=r"the trainer has NCCL 2\.27\.3, the engine NCCL 2\.21\.5"):
        asyncio.run(updater.join(replace(plan(), nccl="2.27.3")))
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    with pytest.raises(BadWeights, match="NCCL_CUMEM_ENABLE is 0 for the trainer, not set for the engine"):
        asyncio.run(updater.join(replace(plan(), nccl="2.21.5", nccl_cumem="0")))
    asyncio.run(updater.join(replace(plan(), nccl="2.21.5", nccl_cumem="1")))  # NCCL's own choice
    assert updater.group == "group"


async def test_a_broadcast_needs_a_joined_group_and_one_that_fails_leaves_it(policy):
    engine = FakeEngine()
    updater = WeightUpdater(engine, policy)
    with pytest.raises(BadWeights, match="in none; join it first"):
        await updater.receive("group", "step-1", 4, "keep", 5.0)
    assert engine.calls == []
    await updater.join(plan())
    engine.fails_at = "update"
    with pytest.raises(WeightsInconsistent):
        await updater.receive("group", "step-1", 4, "keep", 5.0)
    assert updater.group == ""


async def test_updates_do_not_overlap(policy):
    engine = FakeEngine()
    updater = WeightUpdater(engine, policy)
    await asyncio.gather(load(updater, policy), load(updater, policy))
    assert [call for call in engine.calls if call in ("pause keep", "resume")] == ["pause keep", "resume"] * 2


@pytest.mark.parametrize("step", ["update", "version", "reset"])
async def test_a_step_that_fails_refuses_generation_until_one_succeeds(policy, step):
    engine = FakeEngine(fails_at=step)
    updater = WeightUpdater(engine, policy)
    updater.check_consistent()
    with pytest.raises(WeightsInconsistent, match="out of memory"):
        await load(updater, policy)
    assert engine.calls[-2:] == ["pause abort", "resume"]
    with pytest.raises(WeightsInconsistent, match="load them again"):
        updater.check_consistent()
    engine.fails_at = ""
    await load(updater, policy)
    updater.check_consistent()


class Worker(WorkerExtension):
    """The part of vLLM's worker that an update goes through; fails in the step named `fails_in`."""

    def __init__(self, fails_in: str = ""):
        self.fails_in = fails_in
        self.steps: list[str] = []
        self._weight_update_active = False

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails_in:
            raise RuntimeError(f"{name}: connection closed")

    def init_weight_transfer_engine(self, info):
        self._step("join")

    def start_weight_update(self):
        assert not self._weight_update_active, "vLLM refuses a second one"
        self._step("start")
        self._weight_update_active = True

    def update_weights(self, info):
        self._step("update")

    def finish_weight_update(self):
        self._step("finish")
        self._weight_update_active = False


@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_a_worker_returns_the_error_and_takes_the_next_update(step):
    worker = Worker(fails_in=step)
    assert worker.dppo_update_weights({"files": []}) == f"{step}: connection closed"
    worker.fails_in = ""
    assert worker.dppo_update_weights({"files": []}) is None
    assert worker.steps[-3:] == ["start", "update", "finish"]


def test_a_worker_returns_why_it_could_not_join():
    assert Worker(fails_in="join").dppo_join_weight_group({}) == "join: connection closed"


async def test_the_description_does_not_wait_for_an_engine_core_that_loads(policy):
    """It would make a load of a minute look like a frozen server."""
    ended = asyncio.Event()

    class Loading(FakeEngine):
        model_config = Mock(get_vocab_size=lambda: 5, max_model_len=8, max_logprobs=2, model="m")
        vllm_config = Mock(parallel_config=Mock(world_size=1, data_parallel_size=1))

        async def get_weight_version(self):
            await ended.wait()  # behind the load
            return "5"

        async def collective_rpc(self, method, args):
            await ended.wait()
            return [None]

    async def describe(routes):
        reply = json.loads((await asyncio.wait_for(routes._info(None), 1)).body)
        return reply["version"], reply["updating_s"]

    routes, engine = DppoRoutes(), Loading()
    routes._engine, routes._experts, routes._masks = engine, Mock(available=False), Mock(available=False)
    routes._updater = WeightUpdater(engine, policy, version=4)
    loading = asyncio.create_task(load(routes._updater, policy, version=5))
    while "pause keep" not in engine.calls:
        await asyncio.sleep(0.001)
    version, updating_s = await describe(routes)
    ended.set()
    await loading
    assert version == 4
    assert 0 <= updating_s < 1
    assert await describe(routes) == (5, None)
