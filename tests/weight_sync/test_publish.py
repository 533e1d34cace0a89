"""Publishing from real trainer ranks to fake engines: every layout, both transports, every way to fail."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.hf import SafetensorsDirectory, fp8, open_weights, read_hf_config
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weight_sync import publisher, shared_storage
from dppo_megatron.weight_sync.shared_storage import SharedStorage
from dppo_megatron.weights.manifest import Manifest
from tests.support.configs import make_config
from tests.weight_sync.scenarios import FREEZES, LONG_TIMEOUT_S
from tests.weight_sync.trainer_ranks import TIMEOUT_S

FROZEN_OFTEN = {3}  # within a bucket of a broadcast
LAYOUTS = {"tensor": 1, "pipeline": 2, "data": 1, "expert": 2, "expert_in_tensor": 2, "shared_storage": 0}


@pytest.mark.parametrize(("name", "senders"), LAYOUTS.items(), ids=LAYOUTS)
def test_engines_hold_exactly_the_policy(result_of, name, senders):
    result = result_of(name)
    assert set(result["differences"]) == {0.0}
    assert result["streams"] == senders
    assert [p.version for p in result["published"]] == [0, 1, 2]
    assert result["published"][0].nbytes > 50_000
    assert result["published"][-1].difference.largest == 0
    assert set(result["groups"]) == ({1} if senders else {0}), "one group serves all updates"
    assert result["policy"].version == 2
    assert (result["policy"].path is None) == bool(senders)


@pytest.mark.parametrize("name", ["fp8_emulated_broadcast", "fp8_emulated_shared_storage"])
def test_emulated_fp8_is_the_export_in_fp8_dequantised(result_of, sync_runs, name):
    result = result_of(name)
    assert result["unlike"] == []
    assert not any(name.endswith("_scale_inv") for name in result["names"])
    if name == "fp8_emulated_shared_storage":
        assert read_hf_config(RunDir(sync_runs / name).weights_of(1)).quantization is None


@pytest.mark.parametrize("name", ["fp8_broadcast", "fp8_broadcast_small_buckets", "fp8_shared_storage"])
def test_fp8_engines_hold_bit_for_bit_what_the_weights_quantise_to(result_of, name):
    result = result_of(name)
    assert result["unlike"] == []
    assert "model.layers.1.self_attn.q_proj.weight_scale_inv" in result["names"]
    assert "differ from the trainer's by 1.5" in result["message"]
    assert "engine.quantization = fp8_block" in result["message"]
    assert "rollout.max_mismatch_kl" in result["message"]


def test_weights_and_scales_travel_together(result_of):
    (buckets,) = result_of("fp8_broadcast")["buckets"]
    assert buckets <= 2, "0.9 MB in buckets of 1 MiB"


def test_what_the_fp8_trainer_published_is_a_model_that_reads_as_its_weights(result_of, sync_models, sync_runs):
    result_of("fp8_shared_storage")
    directory = RunDir(sync_runs / "fp8_shared_storage").weights_of(1)
    config = read_hf_config(directory)
    assert config.quantization == fp8.quantization_config(config)
    read, source = open_weights(directory, config), SafetensorsDirectory(sync_models / "wide-b")
    assert set(read.tensors) == set(source.tensors)
    for name in source.tensors:
        expected = source.tensor(name).bfloat16()
        if fp8.is_quantized(name):
            expected = fp8.dequantize(*fp8.quantize(expected), torch.float32)
        assert torch.equal(read.tensor(name), expected), name
    assert Manifest.read(directory).fp8 == {name for name in source.tensors if fp8.is_quantized(name)}


@pytest.mark.parametrize("transport", ["broadcast", "shared_storage"])
def test_a_weight_beyond_fp16_is_named_on_every_rank_and_not_published(result_of, transport):
    result = result_of(f"overflows_{transport}")
    assert result["dtypes"] == {torch.float16}
    for message in result["messages"]:
        assert "model.layers.1.mlp.down_proj.weight: contains values beyond 65504" in message
        assert "use bf16 (model.dtype, engine.dtype or --dtype)" in message
    assert result["kept"]
    assert result["left"] == []


def test_colocated_engines_and_the_actor_take_turns(result_of):
    result = result_of("colocated")
    turn = ["score", "offloaded", "wake", "load", "check", "sleep", "onloaded"]
    awake = [event for event in turn if event != "sleep"]
    first, second = result["events"]
    assert first == turn + awake
    assert second == ["score", "offloaded", "onloaded"] * 2
    assert "did not free their memory" in result["message"]
    assert result["differences"] == [0.0]


@pytest.mark.parametrize("place", ["join", "receive", "bucket"])
def test_an_engine_that_dies_is_left_out_and_taken_in_again(result_of, place):
    result = result_of(f"dies_at_{place}")
    assert result["unconfirmed"] == [0 if place == "join" else 1, 0]
    assert set(result["differences"]) == {0.0}
    assert result["served"] == [1, 1]
    assert result["lags"] == [True, False, False], "each instance of an engine is reported once"
    assert result["seconds"] < 2 * TIMEOUT_S


def test_a_sender_whose_engine_died_tells_the_others(result_of):
    """The others are within a bucket, which gloo ends only after its time-out, and do not know of the death yet."""
    result = result_of("dies_unnoticed")
    assert result["unconfirmed"] == 1
    assert result["differences"] == [0.0]
    assert result["survivor_s"][0] < LONG_TIMEOUT_S / 5


def test_the_time_of_an_attempt_is_not_time_without_an_engine(result_of):
    result = result_of("fails_once")
    assert result["version"] == 0
    assert result["differences"] == [0.0]


def test_the_reasons_of_a_wait_for_engines_are_on_the_line_that_warns(monkeypatch, caplog):
    """A launcher shows the first line of a warning."""
    monkeypatch.setattr(publisher.time, "sleep", lambda _: None)
    publisher._Retries(3, 60.0).wait((), {"engine-0": "refused", "engine-1": "silent"})
    (line,) = caplog.messages
    assert re.fullmatch(
        r"policy 3: waiting for an engine to .*, [56]\d s left: engine-0: refused; engine-1: silent", line
    )


@pytest.mark.slow
def test_ranks_wait_as_long_as_an_engine_may_take_to_score(result_of):
    """Scoring waits after long requests in the engine's queue; the bound follows from the longest response."""
    assert result_of("scores_late")["unconfirmed"] == 0


def test_a_trainer_that_starts_again_takes_over_what_earlier_lives_left(tmp_path):
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


def test_one_that_disagrees_while_another_agrees_is_left_out(result_of):
    result = result_of("disagrees")
    assert result["unconfirmed"] == 1
    assert set(result["confirmed"]) == {"http://127.0.0.1:90"}


@pytest.mark.parametrize("transport", FREEZES)
def test_one_that_keeps_a_part_of_the_version_before_is_left_out(result_of, transport):
    """Its version and its log-probs are as they should be: only its fingerprint is not."""
    result = result_of(f"keeps_{transport}")
    assert result["unconfirmed"] == 1
    assert set(result["confirmed"]) == {"http://127.0.0.1:90"}
    assert "no engine agrees with the trainer" in result["message"]
    assert "has other weights than the trainer sent" in result["message"]


def test_a_single_token_that_differs_much_is_not_other_weights(result_of):
    """In 16 bits a router of a mixture of experts may decide otherwise."""
    difference = result_of("one_token")["difference"]
    assert difference.mean == pytest.approx(0.5 / 7)
    assert difference.largest == pytest.approx(0.5)


def test_one_that_freezes_within_a_bucket_is_not_waited_for(result_of):
    result = result_of("freezes")
    assert result["unconfirmed"] == 1
    assert result["differences"] == [0.0]
    assert result["seconds"] < LONG_TIMEOUT_S / 5


@pytest.mark.parametrize(
    ("transport", "place"),
    [
        pytest.param(transport, place, marks=() if place in FROZEN_OFTEN else pytest.mark.slow)
        for transport, places in FREEZES.items()
        for place in places
    ],
)
def test_one_that_freezes_is_left_out_and_training_goes_on(result_of, transport, place):
    """No trainer rank waits for an engine in a training collective: their time-outs are equal."""
    result = result_of(f"freezes_at_{place}_{transport}")
    assert result["unconfirmed"] == 1
    assert result["differences"] == [0.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dead", ["waited 2 s (engine.unavailable_timeout_s)", "http://127.0.0.1:90", "connection failed"]),
        ("dies_for_good", ["waited 2 s", "http://127.0.0.1:90"]),
        ("frozen", ["no engine could load it in 3 attempts", "no answer", "aborted"]),
        ("refuses", ["http://127.0.0.1:90", "does not match the model"]),
        ("cannot_load", ["no engine could load it", "out of memory"]),
        ("other_weights", ["http://127.0.0.1:90", "differ from the trainer's by 0.5", "weight_sync.probe_tolerance"]),
        ("not_a_number", ["differ from the trainer's by nan"]),
    ],
)
def test_failures_are_raised_in_time_on_every_rank_and_nothing_is_published(result_of, name, says):
    result = result_of(name)
    for message in result["messages"]:
        assert all(part in message for part in says), message
    assert not result["written"]
    assert result["seconds"] < 3 * TIMEOUT_S
