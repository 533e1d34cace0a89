"""Publishing from real trainer ranks to fake engines, in every layout and over both transports."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.hf import SafetensorsDirectory, fp8, open_weights, read_hf_config
from dppo_megatron.rollout.engines.protocol import EngineError
from dppo_megatron.rollout.fleet.engine_checks import ScoreDifference
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.weight_sync import shared_storage
from dppo_megatron.train.weight_sync.publisher import PublishResult
from dppo_megatron.train.weight_sync.shared_storage import SharedStorage
from dppo_megatron.weights.manifest import Manifest
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.actor_ranks import Rank, on_ranks
from tests.support.configs import make_config
from tests.support.fakes.engine import SCORES
from tests.train.weight_sync.trainer_ranks import Trainer, error_of, trainer

LAYOUTS = {  # senders, and the layout
    "tensor": (1, {"tp": 2}),
    "pipeline": (2, {"pp": 2}),
    "data": (1, {"engines": 2}),
    "expert": (2, {"family": "qwen3_moe", "ep": 2}),
    "expert_in_tensor": (2, {"family": "qwen3_moe", "tp": 2, "ep": 2}),
    "shared_storage": (0, {"tp": 2, "transport": "shared_storage"}),
}
FP8_LAYOUTS = {
    "fp8_broadcast": {"family": "wide", "tp": 2, "bucket_bytes": 1 << 20},
    "fp8_broadcast_small_buckets": {"family": "qwen3_moe", "ep": 2},
    "fp8_shared_storage": {"family": "wide", "pp": 2, "transport": "shared_storage"},
}
EMULATED_LAYOUTS = {
    "fp8_emulated_broadcast": {"family": "qwen3_moe", "ep": 2},
    "fp8_emulated_shared_storage": {"family": "wide", "tp": 2, "transport": "shared_storage"},
}


def test_the_record_of_a_publish():
    result = PublishResult(3, 600, 1.0, 2.0, 0.5, 0.25, ScoreDifference(1e-3, 2e-2), unconfirmed=1, changed_share=0.1)
    assert result.metrics() == {
        "publish/bytes": 600.0,
        "publish/bytes_per_s": 200.0,
        "publish/changed_share": 0.1,
        "probe/mean_abs_logprob_difference": 1e-3,
        "probe/max_abs_logprob_difference": 2e-2,
        "time/publish_export_s": 1.0,
        "time/publish_load_s": 2.0,
        "time/publish_pause_s": 0.5,
        "time/publish_probe_s": 0.25,
        "engine/unconfirmed": 1.0,
    }


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_engines_hold_exactly_the_policy(rank: Rank, name: str):
    senders, layout = LAYOUTS[name]
    with trainer(rank, **{"family": "qwen3", **layout}) as t:
        for version, policy in enumerate("aba"):
            published = t.publish(policy, version)
            t.assert_held(policy)
            assert published.version == version
            assert published.nbytes > 50_000
        assert published.difference.largest == 0
        if t.engines:
            assert len(getattr(t.publisher._transport, "_streams", ())) == senders
            assert {len(engine.joined) for engine in t.engines} == {1 if senders else 0}, "one group serves all updates"
            policy = PublishedPolicy.read(RunDir(rank.directory).published)
            assert policy.version == 2
            assert (policy.path is None) == bool(senders)


def publish_both(t: Trainer) -> list[str]:
    """Publish two policies; on rank 0 check and name the tensors that the engine has."""
    for version, policy in enumerate("ab"):
        t.publish(policy, version)
        if t.engines:
            assert t.unlike_fp8(policy) == []
    return [name for engine in t.engines for name in engine.weights]


@pytest.mark.parametrize("name", EMULATED_LAYOUTS)
@on_ranks(2)
def test_emulated_fp8_is_the_export_in_fp8_dequantised(rank: Rank, name: str):
    with trainer(rank, engine={"dtype": "bf16", "quantization": "fp8_block_emulated"}, **EMULATED_LAYOUTS[name]) as t:
        names = publish_both(t)
        assert not any(name.endswith("_scale_inv") for name in names)
        if name == "fp8_emulated_shared_storage":
            assert read_hf_config(RunDir(rank.directory).weights_of(1)).quantization is None


@pytest.mark.parametrize("name", FP8_LAYOUTS)
@on_ranks(2)
def test_fp8_engines_hold_the_bits_of_the_quantised_weights(rank: Rank, name: str):
    """An engine that computes otherwise is refused."""
    with trainer(rank, engine={"dtype": "bf16", "quantization": "fp8_block"}, **FP8_LAYOUTS[name]) as t:
        names = publish_both(t)
        if t.engines:
            assert "model.layers.1.self_attn.q_proj.weight_scale_inv" in names
            t.engines[0].score_offset = 1.5
        if name == "fp8_broadcast" and t.engines:
            (stream,) = t.publisher._transport._streams
            assert len(stream) <= 2, "0.9 MB in buckets of 1 MiB: weights and scales travel together"
        if name == "fp8_shared_storage" and t.engines:
            assert_reads_as(RunDir(rank.directory).weights_of(1), rank.models / "wide-b")
        message = error_of(t.publisher.publish, 2)
        assert "differ from the trainer's by 1.5" in message
        assert "engine.quantization = fp8_block" in message
        assert "rollout.max_mismatch_kl" in message


def assert_reads_as(directory: Path, source: Path) -> None:
    """A published FP8 directory is a model, and reads as its quantised weights."""
    config = read_hf_config(directory)
    assert config.quantization == fp8.quantization_config(config)
    read, source = open_weights(directory, config), SafetensorsDirectory(source)
    assert set(read.tensors) == set(source.tensors)
    for name in source.tensors:
        expected = source.tensor(name).bfloat16()
        if fp8.is_quantized(name):
            expected = fp8.dequantize(*fp8.quantize(expected), torch.float32)
        assert torch.equal(read.tensor(name), expected), name
    assert Manifest.read(directory).fp8 == {name for name in source.tensors if fp8.is_quantized(name)}


@pytest.mark.parametrize("transport", ["broadcast", "shared_storage"])
@on_ranks(2)
def test_a_weight_beyond_fp16_is_named_on_every_rank_and_not_published(rank: Rank, transport: str):
    """Publish a policy that fits, then one with a value beyond fp16, which only the last rank has."""
    with trainer(rank, "qwen3", tp=2, engine={"dtype": "fp16"}, transport=transport) as t:
        t.publish("a", 0)
        before = [dict(engine.weights) for engine in t.engines]
        t.load("b")
        if rank.rank == 1:
            t.actor.model_chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data[3, 4] = 70_000.0
        message = error_of(t.publisher.publish, 1)
        assert "model.layers.1.mlp.down_proj.weight: contains values beyond 65504" in message
        assert "use bf16 (model.dtype, engine.dtype or --dtype)" in message
        for engine, weights in zip(t.engines, before, strict=True):
            assert engine.weights.keys() == weights.keys()
            assert all(torch.equal(engine.weights[name], tensor) for name, tensor in weights.items())
            assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
            assert not list(rank.directory.glob("weights/*1*"))


@on_ranks(2)
def test_colocated_engines_and_the_actor_take_turns(rank: Rank):
    """Two publishes to an engine on the trainer's GPUs; at the second turn it does not go to sleep."""
    with trainer(rank, "qwen3", tp=2, engine={"placement": "colocated"}, transport="shared_storage") as t:
        events: list[str] = []
        at_home = {id(p): p.data for chunk in t.actor.model_chunks for p in chunk.parameters()}

        @contextmanager
        def offloaded():
            parameters = [p for chunk in t.actor.model_chunks for p in chunk.parameters()]
            for parameter in parameters:
                parameter.data = torch.empty(0)
            events.append("offloaded")
            yield 0
            for parameter in parameters:
                parameter.data = at_home[id(parameter)]
            events.append("onloaded")

        async def stay_awake() -> None:
            raise EngineError("http://127.0.0.1:90: busy")

        t.actor.offloaded = offloaded
        t.actor.score = lambda tokens: events.append("score") or SCORES
        for engine in t.engines:
            engine.events = events
        t.publish("a", 0)
        t.publisher.onload_actor()
        t.publish("b", 1)
        for engine in t.engines:
            engine.sleep = stay_awake
        assert "did not free their memory" in error_of(t.publisher.onload_actor)
        t.assert_held("b")
        turn = ["score", "offloaded", "wake", "load", "check", "sleep", "onloaded"]
        awake = [event for event in turn if event != "sleep"]
        assert events == (turn + awake if t.engines else ["score", "offloaded", "onloaded"] * 2)


def test_a_restarted_trainer_takes_over_the_versions_of_earlier_attempts(tmp_path):
    run = RunDir(tmp_path)
    for version in (3, 11, 12):
        run.weights_of(version).mkdir(parents=True)
    (run.weights / ".v000013.writing").mkdir()
    (run.weights / "start").mkdir()
    config = make_config(run={"dir": tmp_path}, weight_sync={"keep_versions": 2})
    storage = SharedStorage(config, None, SimpleNamespace(rank=0))

    def left() -> list[str]:
        return sorted(path.name for path in run.weights.iterdir())

    assert left() == ["start", "v000003", "v000011", "v000012"]
    storage.after_confirmation(11)  # resumed from before version 12
    assert left() == ["start", "v000011", "v000012"]


def test_a_version_prepared_twice_is_no_delta_of_itself(tmp_path, monkeypatch):
    """Its second files would replace the base of the delta."""
    monkeypatch.setattr(SharedStorage, "_write_delta", lambda *_: pytest.fail("a delta of itself"))
    written = []
    monkeypatch.setattr(shared_storage, "save_hf", lambda _chunks, directory, **_: written.append(directory.name))
    config = make_config(run={"dir": tmp_path}, weight_sync={"full_every": 4, "fingerprint": False})
    storage = SharedStorage(config, SimpleNamespace(model_chunks=[], hf=None), SimpleNamespace(rank=0))
    for _ in range(2):
        storage.prepare(7)
    assert written == ["v000007", "v000007"]
