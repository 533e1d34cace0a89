"""The SGLang client against servers that talk nonsense, fail half-way through an update, or ignore the temperature."""

import base64
import json
import re
import time
from uuid import UUID

import numpy as np
import pytest

from dppo_megatron.config.model import LoraConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.hf import read_hf_config
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    InvalidSample,
)
from dppo_megatron.rollout.engines.sglang import client as sglang_client
from dppo_megatron.rollout.engines.sglang import weights as sglang_weights
from dppo_megatron.rollout.engines.sglang.client import SglangEngine
from dppo_megatron.rollout.engines.sglang.wire import child_ids
from dppo_megatron.rollout.fleet.engine_checks import check_health
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.weights.broadcast_plan import TensorSpec, WeightGroupPlan
from dppo_megatron.weights.manifest import Manifest
from tests.support.engines import EOS, MAX_MODEL_LEN, VOCAB, engine_config, group, make_adapter, make_model
from tests.support.fakes.http_server import against, http

REQUEST = group("g", n=2, max_tokens=3, topk=2, prompt=np.array([4, 5, 6]))
SERVER = {
    "max_req_input_len": MAX_MODEL_LEN + 2,
    "dtype": "float32",
    "version": "0.5.23",
    "tp_size": 1,
    "enable_return_routed_experts": False,
    "enable_deterministic_inference": True,
    "skip_tokenizer_init": True,
    "speculative_algorithm": None,
    "preferred_sampling_params": None,
    "enable_lora": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "a", seed=1)


@pytest.fixture
def config(model):
    return with_settings(engine_config(model, kind="sglang", request_timeout_s=1.0), weight_sync={"timeout_s": 1.0})


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Fix the suffix that the client adds to a request's id, so that replies can be written in advance."""
    monkeypatch.setattr(sglang_client, "uuid4", lambda: UUID(int=0))


def say(value, status=200) -> bytes:
    return http(status, json.dumps(value).encode())


def description(model, **changed) -> dict[str, list[bytes]]:
    return {
        "/server_info": [say(SERVER | changed)] * 9,
        "/model_info": [say({"weight_version": "3", "model_path": str(model)})] * 9,
    }


def sample(index: int, *, topk=(-1.0, -2.0), request=REQUEST, **meta) -> dict:
    ids, logprobs = np.array([[7, 8]] * 3, "<i4"), np.array([topk] * 3, "<f4")
    return {
        "output_ids": [9, 10, 11],
        "meta_info": {
            "id": child_ids(f"{request.request_id}~{0:08}", request.n)[index],
            "finish_reason": {"type": "length", "length": 3},
            "weight_versions": [{"version": "3", "start": 0, "end": 3}],
            "output_token_logprobs": [[-2.5, 9, None], [-2.5, 10, None], [-2.5, 11, None]],
            "output_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            "output_top_logprobs_val_flat_b64": base64.b64encode(logprobs.tobytes()).decode(),
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_null_prefix": 0,
        }
        | meta,
    }


def generate(engine):
    return engine.generate(REQUEST)


def test_a_mixture_with_layers_that_sglang_would_leave_unset_is_refused(tmp_path):
    model = make_model(tmp_path / "a", seed=1, experts=4, dense_layers=[1])
    info = against(engine_config(model, kind="sglang"), description(model), SglangEngine.info)
    (problem,) = info.problems
    assert "mlp_only_layers" in problem


def test_a_good_reply_passes(config, model):
    replies = description(model) | {"/generate": [say([sample(0), sample(1)])]}
    rollouts = against(config, replies, generate)
    assert [r.token_ids.tolist() for r in rollouts] == [[9, 10, 11]] * 2
    assert rollouts[1].topk_ids.tolist() == [[7, 8]] * 3
    assert (rollouts[1].versions == 3).all()


ENTRIES = [[-2.5, 9, None], [-2.5, 10, None], [-2.5, 11, None]]
INVALID = [  # changes of the last sample
    ({"output_token_logprobs": [ENTRIES[0], [None, 10, None], ENTRIES[2]]}, "missing or not finite"),
    ({"output_token_logprobs": ENTRIES[:2]}, "belong to other tokens"),
    ({"output_token_logprobs": [ENTRIES[0], [-2.5, 12, None], ENTRIES[2]]}, "belong to other tokens"),
    ({"id": child_ids("other", 2)[1]}, "expected the answer to"),
    ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "token 2: token carries no policy version"),
    ({"weight_versions": [{"version": "inconsistent", "start": 0, "end": 3}]}, "token carries no policy version"),
    ({"output_top_logprobs_idx_flat_b64": "AAAA"}, "buffer size|reshape"),
    ({"output_top_logprobs_val_flat_b64_dtype": "float16"}, "top-K log-probs have dtypes"),
    ({"output_top_logprobs_null_prefix": 1}, "begin at token 1"),
    ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "finish reason is none of"),
    ({"finish_reason": None}, "missing or invalid"),
]


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        *((say([sample(0), sample(1, **changed)]), InvalidSample, message) for changed, message in INVALID),
        (say([sample(0)]), InvalidSample, "expected 2 samples"),
        (say({"text": "hello"}), InvalidSample, "expected 2 samples"),
        (http(200, b""), InvalidSample, "not JSON"),
        (http(200, json.dumps([sample(0)]).encode()[:-9]), InvalidSample, "not JSON"),
        (None, EngineTimeout, "generation of group g"),  # it gets an abort
    ],
)
def test_wrong_replies_and_silence(config, model, reply, error, message):
    replies = description(model) | {"/generate": [reply], "/abort_request": [say({})] * 2}
    with pytest.raises(error, match=message) as raised:
        against(config, replies, generate)
    assert "127.0.0.1" in str(raised.value)


def test_stop_tokens_that_leave_out_the_models_own(config, model):
    request = group("g", stop=(40,))
    with pytest.raises(EngineRefused, match=rf"own end tokens \[{EOS}\]; add them to rollout.stop_token_ids"):
        against(config, description(model), lambda engine: engine.generate(request))


def test_invalid_scores(config, model):
    for entries in ([[None, 4, None], [-1.0, 7, None]], [[None, 4, None], [None, 5, None]], [[None, 4, None]]):
        meta = {"input_token_logprobs": entries, "weight_version": "3"}
        replies = description(model) | {"/generate": [say({"meta_info": meta})]}
        with pytest.raises(InvalidSample, match="scoring of 2 tokens"):
            against(config, replies, lambda engine: engine.score(np.array([4, 5])))


def test_the_last_token_of_the_vocabulary_is_scored(config, model):
    meta = {"input_token_logprobs": [[None, 4, None], [-1.5, 0, None]], "weight_version": "3"}
    replies = description(model) | {"/generate": [say({"meta_info": meta})]}
    assert against(config, replies, lambda engine: engine.score(np.array([4, VOCAB - 1]))).tolist() == [-1.5]


UPDATE = "/update_weights_from_disk"
DONE = {"/pause_generation": [say({})], "/continue_generation": [say({})], "/update_weight_version": [say({})] * 2}


@pytest.mark.parametrize("reply", [say({"success": False, "message": "out of memory"}, 400), b"", None])
def test_a_failed_update_leaves_weights_under_an_invalid_label(config, model, reply):
    """Generation continues, under a label that makes every further token invalid."""
    left = DONE | {UPDATE: [reply]}
    with pytest.raises(EngineError, match="loading policy 4") as error:
        against(config, left, lambda engine: engine.load_weights(model, 4), unused := [])
    assert not isinstance(error.value, EngineRefused)
    assert unused == []


def test_a_server_that_freezes_in_an_update_is_not_waited_for_again(config, model, monkeypatch):
    """Neither the label nor the end of the pause waits as long as for a server that answers."""
    monkeypatch.setattr(sglang_weights, "CLEAN_UP_TIMEOUT_S", 0.1)
    frozen = DONE | {UPDATE: [None], "/update_weight_version": [say({}), None], "/continue_generation": [None]}
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match=r"no answer within \S+ s to loading policy 4"):
        against(config, frozen, lambda engine: engine.load_weights(model, 4), unused := [])
    assert time.monotonic() - started < 10
    assert unused == []


def test_a_server_that_updates_its_weights_is_alive_though_its_scheduler_is_silent(config, model):
    async def check_twice(engine):
        await engine.info()
        first = await check_health(engine, config)
        return first, await check_health(engine, config)

    labels = [say({"weight_version": label, "model_path": str(model)}) for label in ["3"] + ["updating-1"] * 4]
    replies = {"/server_info": [say(SERVER), None], "/model_info": labels}
    first, second = against(config, replies, check_twice)
    assert 0 <= first.updating_s < second.updating_s < 1
    assert second.version == 3


MEMORY = "NCCL_CUMEM_ENABLE is .* for the trainer, .* for the engine"


@pytest.mark.parametrize(
    ("trainer", "engine", "message"),
    [
        (("2.27.3", ""), ("2.21.5", ""), r"the trainer has NCCL 2\.27\.3, the engine NCCL 2\.21\.5"),
        (("2.30.7", ""), ("2.30.7", "0"), MEMORY),
        (("2.30.7", "0"), ("2.30.7", ""), MEMORY),
        (("2.30.7", "0"), ("2.30.7", "1"), MEMORY),
    ],
)
def test_a_weight_group_with_unequal_nccls_is_refused_before_its_ends_wait(config, model, trainer, engine, message):
    tensors = tuple(TensorSpec(name, "float32", shape) for name, shape in Manifest.read(model).shapes.items())
    plan = WeightGroupPlan("group", "127.0.0.1", 1, "nccl", 5.0, 1, ((tensors,),), 0, *trainer)
    found = dict(zip(("dppo_nccl", "NCCL_CUMEM_ENABLE"), engine, strict=True))
    replies = description(model) | {"/weights_checker": [say({"ranks": [{"checksums": found}]})]}
    with pytest.raises(EngineRefused, match=message):
        against(config, replies, lambda engine: engine.join_weight_group(plan))


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("Unsupported action='dppo_fingerprint'", EngineIncompatible, "Unsupported .*PYTHONPATH lacks the folder"),
        ("CUDA out of memory", EngineError, "fingerprints of its weights failed.*CUDA out of memory$"),
    ],
)
def test_a_fingerprint_that_failed_leaves_the_engine_out_and_a_missing_plugin_is_named(config, said, error, message):
    replies = {"/weights_checker": [say({"success": False, "message": said}, 400)]}
    with pytest.raises(error, match=message) as raised:
        against(config, replies, lambda engine: engine.weights_fingerprint())
    assert raised.type is error


def test_running_requests_that_do_not_end(config, model):
    busy = {"/v1/loads": [say({"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]})] * 99}
    with pytest.raises(EngineTimeout, match="the old weights stay in use"):
        against(config, busy, lambda engine: engine.load_weights(model, 4, "wait"))


@pytest.mark.parametrize(("second", "raw"), [(-2.0, True), (-1.5, False)])
def test_log_probs_that_ignore_the_temperature_are_found_out(config, model, second, raw):
    """The two most likely tokens are 1 nat apart at temperature 1, and must be half a nat apart at temperature 2."""

    async def check(engine):
        replies = iter([(-1.0, -2.0), (-1.0, second)])

        async def answer(what, path, timeout_s, *, body, **_):
            request = group(re.sub("~0+#0;$", "", body["rid"][0]), n=1, max_tokens=1, topk=2)
            one = sample(0, topk=next(replies), request=request)
            one["output_ids"], meta = one["output_ids"][:1], one["meta_info"]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:1]
            for name in ("idx", "val"):
                key = f"output_top_logprobs_{name}_flat_b64"
                meta[key] = base64.b64encode(base64.b64decode(meta[key])[:8]).decode()
            return json.dumps([one]).encode()

        call = engine._calls.call
        engine._calls.call = lambda what, path, *a, **k: (answer if path == "/generate" else call)(what, path, *a, **k)
        return await engine.check_compatible(config)

    if raw:
        with pytest.raises(EngineIncompatible, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            against(config, description(model), check)
    else:
        assert against(config, description(model), check).logprobs_mode == "processed_logprobs"


def test_servers_that_do_not_suit(config, model):
    unfit = {"enable_deterministic_inference": False, "skip_tokenizer_init": False, "speculative_algorithm": "EAGLE"}
    info = against(config, description(model, **unfit), SglangEngine.info)
    assert len(info.problems) == 3


def with_adapters(config: Config) -> Config:
    lora = LoraConfig(r=4, targets=("self_attn.q_proj", "v_proj"))
    return with_settings(config, weight_sync={"lora": "adapter"}, model={"lora": lora})


def test_a_server_without_our_plugin_is_sent_no_adapter(config, model, tmp_path):
    """It would take its file for one of weights, all of them unknown, and label the start weights with the version."""
    config = with_adapters(config)
    make_adapter(tmp_path / "v4", model, config.model.lora, seed=1)
    replies = description(model) | {
        "/weights_checker": [say({"success": False, "message": "Unsupported action='dppo_nccl'"}, 400)]
    }
    with pytest.raises(EngineIncompatible, match=r"loading policy 4 .*PYTHONPATH lacks the folder"):
        against(config, replies, lambda engine: engine.load_weights(tmp_path / "v4", 4))


@pytest.mark.parametrize(("adapters", "enabled"), [(True, True), (True, None), (False, True)])
def test_a_server_takes_adapters_or_whole_models(config, model, adapters, enabled):
    """It would load a whole model into layers that have an adapter, or skip an adapter, and report success."""
    config = with_adapters(config) if adapters else config
    info = against(config, description(model, enable_lora=enabled), SglangEngine.info)
    assert ["--enable-lora" in problem for problem in info.problems] == [True] * (adapters != bool(enabled))
    command = KINDS["sglang"].command(config, 1, model, 0, device="cuda")
    assert ("--enable-lora" in command) == adapters
    if adapters:
        first = command.index("--lora-target-modules") + 1
        assert command[first : first + 2] == ["q_proj", "v_proj"]
        with pytest.raises(EngineRefused, match="no adapter in PEFT's format"):
            against(config, description(model), lambda engine: engine.load_weights(model, 4))


def test_seeds_are_needed_only_where_the_run_wants_them(config, model):
    """They cost batch-invariant kernels; without them samples are still of the policy."""
    unseeded = with_settings(config, engine={"seeded": False})
    server = description(model, enable_deterministic_inference=False)
    assert against(unseeded, server, SglangEngine.info).problems == ()
    flag = "--enable-deterministic-inference"
    assert flag in KINDS["sglang"].command(config, 1, model, 0)
    assert flag not in KINDS["sglang"].command(unseeded, 1, model, 0)


@pytest.mark.parametrize(("gpus", "tokens"), [(1, 1), (2, 2), (8, 2)])
def test_the_cache_of_a_gpu_holds_its_share_of_the_heads(config, model, gpus, tokens):
    """The model has two key-value heads; a GPU has one at least."""
    shape = read_hf_config(model)
    one = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    config = with_settings(config, engine={"kv_cache_bytes": 10 * one, "tensor_parallel": gpus})
    command = KINDS["sglang"].command(config, 1, model, 0, device="cuda")
    assert command[command.index("--max-total-tokens") + 1] == str(10 * tokens)


@pytest.mark.parametrize(
    ("placement", "device"), [("colocated", "cuda"), ("colocated", "cpu"), ("disaggregated", "cuda")]
)
def test_only_engines_that_are_to_free_memory_of_gpus_are_started_so(config, model, placement, device):
    config = with_settings(config, engine={"placement": placement})
    command = KINDS["sglang"].command(config, 1, model, 0, device=device)
    assert ("--enable-memory-saver" in command) == ((placement, device) == ("colocated", "cuda"))


def labelled(*labels: str) -> list[bytes]:
    return [say({"weight_version": label}) for label in labels]


IDLE = {"/v1/loads": [say({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})]}


def test_memory_is_given_back_by_an_idle_server_that_takes_no_requests(config):
    """Its scheduler would end otherwise. Other clients only see the label, which is the last step."""
    sleeps = {**IDLE, "/pause_generation": [say({})], "/update_weight_version": [say({})] * 2}
    sleeps |= {"/release_memory_occupation": [say(None)], "/model_info": labelled("3")}
    against(config, sleeps, SglangEngine.sleep, unused := [])
    assert unused == []
    against(config, {"/model_info": labelled("asleep-3")}, SglangEngine.sleep)
    busy = {"/v1/loads": [say({"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]})] * 99}
    with pytest.raises(EngineTimeout, match="going to sleep: running requests did not end"):
        against(config, busy | {"/model_info": labelled("3")}, SglangEngine.sleep)


@pytest.mark.parametrize("label", ["asleep-3", "empty-3", "updating-1", "inconsistent"])
def test_an_engine_that_may_sleep_is_woken_and_one_that_serves_is_not(config, label):
    """A call is repeated if its answer was lost; the plug-in ignores the second one."""
    wakes = {"/resume_memory_occupation": [say(None)], "/update_weight_version": [say({})] * 2}
    against(config, wakes | {"/model_info": labelled(label)}, SglangEngine.wake, unused := [])
    assert unused == []
    against(config, {"/model_info": labelled("3")}, SglangEngine.wake)


@pytest.mark.parametrize("call", [SglangEngine.sleep, SglangEngine.wake])
def test_a_server_that_fails_to_sleep_or_wake_is_marked(config, call):
    """Its tokens are refused from then on: the label of the update that began is replaced."""
    fails = {**IDLE, "/pause_generation": [say({})], "/update_weight_version": [say({})] * 2}
    label = "3" if call is SglangEngine.sleep else "asleep-3"
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        fails[route] = [say({"error": {"message": "out of memory"}}, 400)]
    with pytest.raises(EngineError, match="out of memory") as raised:
        against(config, fails | {"/model_info": labelled(label)}, call, unused := [])
    assert not isinstance(raised.value, EngineRefused), "it would end the run"
    assert "/update_weight_version" not in unused


def test_weights_are_not_loaded_into_an_engine_that_sleeps(config, model):
    """A sleeping engine has freed the memory of its weights."""
    colocated = with_settings(config, engine={"placement": "colocated"})
    with pytest.raises(EngineError, match=r"loading policy 4 .*put to sleep.*wake it") as raised:
        against(colocated, {"/model_info": labelled("asleep-3")}, lambda engine: engine.load_weights(model, 4))
    assert not isinstance(raised.value, EngineRefused)
