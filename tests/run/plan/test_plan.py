"""The plan of published models: exact counts, every rejection, and advice that is true."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.common.hardware import GIB
from dppo_megatron.config import ConfigError, read_config
from dppo_megatron.data.micro_batches import computed_pairs
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.flops import ModelFlops
from dppo_megatron.run.checks import engine as rules
from dppo_megatron.run.plan import Advice, Cluster, advise, hardware, make_plan, report
from dppo_megatron.run.plan.activations import Layer, MicroBatchWork, layer
from dppo_megatron.run.plan.engines import engine_memory
from dppo_megatron.run.plan.memory import _explain
from dppo_megatron.train.trainer.batches import UpdateBatch
from dppo_megatron.train.trainer.metrics import StepMetrics, Throughput
from tests.support.configs import make_config
from tests.support.updates import update_stats

EXAMPLES = Path(__file__).parents[3] / "examples"


def config(name: str, *overrides: str):
    path = EXAMPLES / name / "config.yaml"
    model = EXAMPLES.parent / yaml.safe_load(path.read_text())["model"]["path"]
    return read_config(path, [f"model.path={model}", *overrides])


@pytest.fixture
def plan_of(builder):
    """Plan an example with changed settings, by default on two nodes of H100s."""

    def made(name: str, *overrides: str, nodes: int = 2, gpu: str = "h100-80"):
        return make_plan(config(name, *overrides), Cluster(nodes, 8, hardware(gpu)), builder)

    return made


@pytest.mark.parametrize(
    ("name", "nodes", "parameters", "active"),
    [
        ("qwen3_8b", 2, 8_190_735_360, 8_190_735_360),
        ("qwen3_30b_a3b", 4, 30_532_122_624, 3_353_032_704),
        pytest.param("deepseek_v3", 64, 671_026_419_200, 37_552_297_472, marks=pytest.mark.slow),
    ],
)
def test_parameters_of_published_models_are_exact(plan_of, name, nodes, parameters, active):
    """The totals come from the built ranks; a difference from the files raises."""
    plan = plan_of(name, nodes=nodes, gpu="h200-141")
    assert plan.totals.parameters == parameters
    assert plan.totals.active == active
    assert plan.fits
    text = report(plan, [])
    assert f"{parameters:,} parameters" in text
    flops = plan.totals.flops_per_update
    assert f"model FLOPs of an update: at most {flops / 1e12:,.3g} TFLOP" in text
    assert 0.95 < flops / (6 * active * plan.totals.tokens_per_update) < 1.5  # attention is the rest


@pytest.mark.parametrize("lora", [(), ("model.lora.r=8",)])
def test_plan_and_metric_count_the_same_flops(builder, lora):
    """The plan assumes sequences of the largest length."""
    settings = config("qwen3_8b", "train.updates_per_step=2", *lora)
    plan = make_plan(settings, Cluster(2, 8, hardware("h100-80")), builder)
    r = settings.rollout
    count = r.prompts_per_step * r.group_size // 2
    length = settings.data.max_prompt_tokens + r.max_response_tokens
    step = StepMetrics(
        Throughput(ModelFlops.from_config(plan.hf, settings.model.lora), settings.parallel.world_size, None)
    )
    for _ in range(2):
        pairs = computed_pairs([[list(range(count))]], np.full(count, length), None)
        stats = update_stats(loss_tokens=count * r.max_response_tokens, forward_backward_s=40.0, optimizer_s=10.0)
        step.add_update(stats, UpdateBatch([], count, count * length, count * length, pairs))
    of_step = step.finish()["throughput/tflops_per_gpu"] * 1e12 * 100.0 * settings.parallel.world_size
    assert of_step == pytest.approx(2 * plan.totals.flops_per_update, rel=1e-12)


def test_every_stage_is_planned_and_states_are_sharded(plan_of):
    sets = ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.expert=4")
    plan = plan_of("qwen3_30b_a3b", *sets, nodes=4)
    first, last = (model for model, _ in plan.stages)
    assert first.chunks == (tuple(range(12)), tuple(range(24, 36)))
    assert (first.has_embedding, first.has_head) == (True, False)
    assert (last.has_embedding, last.has_head) == (False, True)
    # 16 ranks / 2 stages: the experts' states are shared by 8 / 4, all others by 8 / tensor 2.
    assert (first.expert_replicas, first.dense_replicas) == (2, 4)
    moments = next(item for item in plan.stages[0][1].static if item.name == "Adam moments")
    assert moments.bytes == 8 * (first.expert // 2 + first.dense // 4)
    assert plan.stages[0][1].tensors != plan.stages[1][1].tensors


def test_attention_of_local_layers_on_a_gpu_is_counted():
    """FlashAttention has one head size, context ranks' keys are gathered, and a prompt's samples are a second call."""

    def made(name: str, *sets: str) -> Layer:
        settings = config(name, *sets)
        return layer(MicroBatchWork(read_hf_config(settings.model.path), settings, 1000, True), False)

    tensor, te, local = "parallel.tensor=2", "model.layers=transformer_engine", "model.layers=local"
    fused, own = made("qwen3_8b", tensor, te), made("qwen3_8b", tensor, local)
    assert own.saved == fused.saved
    context = made("qwen3_8b", tensor, local, "parallel.context=2")
    assert context.total - made("qwen3_8b", tensor, te, "parallel.context=2").total == 2 * 1000 * 2 * 2 * 4 * 128
    assert context.core - own.core == context.total - own.total
    assert made("qwen3_8b", tensor, "model.lora.r=8").working == 2 * 1000 * (8 * 16 + 8 * 4) * 128
    wide, narrow = made("deepseek_v3", local), made("deepseek_v3", te)
    heads = 128 // config("deepseek_v3").parallel.tensor
    assert wide.total - narrow.total == 2 * 2 * 1000 * heads * (192 - 128)
    assert made("qwen3_8b", tensor, local, "model.dtype=fp32").core == 1000 * 16 * (4 + 4 * 4 * 128)


def test_the_stacked_adapters_of_experts_are_counted():
    """A and B of gate and up as one product: [2 r, H] and [2 F, 2 r]; of down: [r, F] and [H, r]."""
    sets = ("parallel.expert=8", "parallel.tensor=4", "parallel.expert_tensor=1", "model.lora.r=32")
    settings = config("qwen3_30b_a3b", *sets)
    made = layer(MicroBatchWork(read_hf_config(settings.model.path), settings, 1000, True), True)
    of_one = 2 * 32 * 2048 + 2 * 768 * 2 * 32 + 32 * 768 + 2048 * 32
    assert made.saved["stacked adapters"] == 2 * 128 // 8 * of_one


def test_an_impossible_layout_is_rejected_with_every_reason(plan_of):
    parallel = ("world_size=48", "tensor=3", "pipeline=5", "expert=7")
    sets = [f"parallel.{value}" for value in parallel] + ["model.fp8=mxfp8", "model.fp32_head=true"]
    with pytest.raises(ConfigError) as raised:
        plan_of("qwen3_30b_a3b", *sets, "model.logits=fused", nodes=4)
    text = "\n".join(raised.value.violations)
    for reason in (
        "parallel.world_size = 48: not a multiple of",
        "trainer ranks and 8 engines of 2 need 64 devices, 4 x 8 are 32",
        "parallel.tensor = 3: does not divide 32 attention heads",
        "4 key-value heads",
        "parallel.pipeline = 5",
        "parallel.expert = 7: does not divide 128 experts",
        "model.fp8 = mxfp8: needs compute capability 10.0 or newer, the GPU has 9.0; use one of tensorwise, blockwise",
        "model.fp32_head = true",
    ):
        assert reason in text


@pytest.mark.parametrize(
    ("gpus", "sets", "reason"),
    [
        (8, ["engine.tensor_parallel=16", "engine.count=1"], r"engine.nodes = 1: .* 16 devices .*; set it to 2"),
        (8, ["engine.tensor_parallel=16", "engine.nodes=2", "engine.count=1"], None),
        (8, ["engine.tensor_parallel=8", "engine.nodes=2", "engine.count=3"], "for 2 engines of 4 devices on 2 nodes"),
        (8, ["engine.tensor_parallel=3", "engine.count=2"], "does not divide 32 attention heads"),
        (8, ["engine.tensor_parallel=8", "engine.count=2", "parallel.world_size=10"], None),
        (6, ["engine.tensor_parallel=4", "engine.count=3", "parallel.world_size=6"], None),
        (6, ["engine.tensor_parallel=4", "engine.count=4", "parallel.world_size=6"], "room for 3 engines of 4"),
    ],
)
def test_engines_are_placed_on_nodes_of_their_own(builder, gpus, sets, reason):
    made, cluster = config("qwen3_8b", *sets), Cluster(4, gpus, hardware("h100-80"))
    if reason is None:
        assert make_plan(made, cluster, builder).engines_fit
        return
    with pytest.raises(ConfigError, match=reason):
        make_plan(made, cluster, builder)


@pytest.mark.slow
def test_an_fp8_deepseek_v3_is_served_on_two_nodes_of_h100s(plan_of):
    """Eight H100s cannot hold it. On sixteen, latent keys and values are whole on each GPU of a stage."""
    hf, h100 = read_hf_config(EXAMPLES / "models" / "deepseek-v3"), hardware("h100-80")
    one_node = engine_memory(hf, config("deepseek_v3"), h100)
    assert (round(one_node.weights / GIB, 1), one_node.sequences) == (79.3, 0)
    tensor = ["engine.tensor_parallel=16", "engine.nodes=2", "engine.count=16"]
    stages = ["engine.pipeline_parallel=2", "engine.nodes=2", "engine.count=16", "rollout.routing_replay=false"]
    # The second stage has fewer layers, but none of the three dense ones, and the head.
    for sets, layers, weights in ((tensor, 61, 40.2), (stages, 30, 40.9)):
        made = engine_memory(hf, config("deepseek_v3", *sets), h100)
        assert round(made.weights / GIB, 1) == weights
        assert made.per_sequence == 9216 * layers * (512 + 64) * 2
        assert made.cache == int(0.9 * h100.memory_bytes) - h100.reserved_bytes - made.weights
        assert made.updates
    plan = plan_of("deepseek_v3", *tensor, nodes=64)
    assert plan.engines_fit
    text = report(plan, [])
    assert "16 engines of 16 over 2 nodes (tensor 16, pipeline 1)" in text
    assert "46 sequences of 9,216 tokens at once" in text
    assert "note: engine.tensor_parallel = 16: over 2 nodes" in text
    text = report(plan_of("deepseek_v3", *stages, nodes=64), [])
    assert "engines of 16 over 2 nodes (tensor 8, pipeline 2)" in text


@pytest.mark.parametrize(("core", "shown"), [(2**18, " MiB"), (-(2**18), " MiB"), (3 * 2**20, "recomputed -3 MiB")])
def test_a_recompute_that_saves_nothing_is_not_shown(core, shown):
    work = SimpleNamespace(config=make_config(model={"path": "m", "recompute": "selective"}), tokens=8)
    assert re.search(
        rf"\(mlp 1(, core attention )?{shown}\)", _explain(work, Layer({"mlp": 2**20}, 0, core), 1, 1, 2**20)
    )


def test_fp8_blocks_are_not_sharded():
    fp8 = "engine.quantization=fp8_block"
    model = read_hf_config(EXAMPLES / "models" / "qwen3-30b-a3b")
    (problem,) = rules.model_problems(config("qwen3_30b_a3b", fp8, "engine.tensor_parallel=4"), model)
    assert "shards moe_intermediate_size = 768" in problem
    assert not [*rules.model_problems(config("qwen3_30b_a3b", fp8), model)]


@pytest.mark.slow
def test_an_update_that_does_not_fit_next_to_the_cache_is_found(plan_of):
    """vLLM holds the experts of a layer whole, as they arrive, until the layer is complete, and its shard twice."""
    cluster = {"nodes": 64, "gpu": "b200-192"}
    sent = ["parallel.pipeline=2", "parallel.first_stage_layers=null", "parallel.last_stage_layers=31"]
    unquantised = ["engine.quantization=none", "engine.tensor_parallel=16", "engine.nodes=2", "engine.count=16"]
    layer = 256 * 3 * 2048 * 7168 * 2  # bytes of the experts of a layer in bf16
    head = 129280 * 7168 * 2  # the largest tensor, which a bucket must hold
    engine = plan_of("deepseek_v3", *unquantised, "weight_sync.transport=broadcast", *sent, **cluster)
    assert engine.engine.update == layer + 2 * layer // 16 + head
    assert engine.engine.sequences > 0
    assert not engine.engines_fit
    assert "engines do not fit: an update needs 25." in report(engine, [])
    assert "weight_sync.transport = shared_storage" in report(engine, [])
    stored = plan_of("deepseek_v3", *unquantised, **cluster)
    assert stored.engine.update == 2 * layer // 16
    assert stored.engines_fit
    dense = plan_of("qwen3_8b")
    assert dense.engine.update == 3 * 151936 * 4096 * 2 + 151936 * 4096 * 2  # the embedding: whole, twice, and arriving


def test_less_cache_makes_room_for_an_update(plan_of):
    made = ["engine.tensor_parallel=1", "engine.count=8", "engine.max_model_len=9216"]
    tight = plan_of("qwen3_8b", *made, gpu="l40s-48")
    assert not tight.engine.updates
    (line,) = (line for line in report(tight, []).splitlines() if line.startswith("engines do not fit"))
    (cache,) = re.findall(r"engine.kv_cache_bytes = (\d+)", line)
    assert plan_of("qwen3_8b", *made, f"engine.kv_cache_bytes={cache}", gpu="l40s-48").engines_fit


def test_engines_too_small_for_the_model_do_not_fit(plan_of):
    """The trainer's figures are reported nevertheless."""
    cramped = plan_of("qwen3_30b_a3b", "engine.tensor_parallel=1", nodes=4, gpu="a100-40")
    assert not cramped.fits
    assert "engines do not fit: weights take 56.9 GiB" in report(cramped, [])
    roomy, halved = plan_of("qwen3_8b"), plan_of("qwen3_8b", "engine.quantization=fp8_block")
    assert roomy.engine.weights == 2 * roomy.totals.parameters
    assert 0.5 < halved.engine.weights / roomy.engine.weights < 0.6  # embedding and head stay in bf16
    # Keys and values of 36 layers with 8 heads of 128, in bf16.
    assert roomy.engine.per_sequence == 9216 * 36 * 2 * 8 * 128 * 2


def test_advice_saves_as_much_as_the_changed_plan(builder, plan_of):
    plan = plan_of("qwen3_8b", gpu="a100-40")
    assert not plan.fits
    first, *others = advise(plan, builder)
    assert first.fits or not any(advice.fits for advice in others)
    assert any(advice.change == {"optimizer.offload": True} for advice in others)
    sets = [f"{name}={value}" for name, value in first.change.items()]
    changed = plan_of("qwen3_8b", *sets, gpu="a100-40")
    assert plan.memory.tensors - changed.memory.tensors == first.saves
    text = report(plan, [first, *others])
    assert "does not fit" in text
    assert f"change first: {first}" in text


@pytest.mark.slow
def test_the_plan_command_needs_only_config_json(tmp_path):
    tree = yaml.safe_load((EXAMPLES / "qwen3_8b" / "config.yaml").read_text())
    tree["model"]["path"] = str(EXAMPLES / "models" / "qwen3-8b")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    arguments = ["plan", str(tmp_path / "c.yaml"), "--nodes", "2", "--gpus-per-node", "8"]
    (tmp_path / "lengths").write_text("\n".join(str(n) for n in range(100, 8000, 7)))
    shown = CliRunner().invoke(app, [*arguments, "--gpu=h100-80", "--rank=5", f"--lengths={tmp_path}/lengths"])
    assert shown.exit_code == 0, shown.output
    for text in ("8,190,735,360 parameters", "rank 5 (stage 0", "fits:", "a step takes", "mean staleness"):
        assert text in shown.output
    with pytest.raises(ValueError, match="--gpu = h1000: known are"):
        CliRunner().invoke(app, [*arguments, "--gpu", "h1000"], catch_exceptions=False)


def test_colocated_engines_need_no_devices_of_their_own(plan_of):
    shared = ["engine.placement=colocated", "rollout.max_staleness=0", "weight_sync.transport=shared_storage"]
    plan = plan_of("qwen3_8b", *shared, nodes=1)
    assert plan.notes == ()
    with pytest.raises(ConfigError, match="which share devices, need 16 devices"):
        plan_of("qwen3_8b", *shared, "engine.count=16", nodes=1)


def test_host_memory_is_planned(plan_of):
    plan = plan_of("qwen3_8b", "acceptance.bound=0.02", "optimizer.offload=true")
    sizes = {item.name: item.bytes for item in plan.memory.host}
    assert sizes["start and end of a step"] == sizes["Adam moments"] == 2 * sizes["main parameters"] > 0
    assert f"pinned, {8 * sizes['Adam moments'] / 2**30:.1f} GiB on a node" in report(plan, [])
    memory = plan_of("qwen3_8b").memory
    assert memory.host == ()
    (whole,), (state,) = memory.saved, plan_of("qwen3_8b", "checkpoint.asynchronous=false").memory.saved
    assert whole.bytes * 12 == state.bytes * 14 > 0  # behind training the weights are copied, too, in bf16


def test_on_a_cpu_the_host_is_the_device(builder, plan_of):
    def static(*sets: str) -> int:
        return plan_of("qwen3_8b", *sets, gpu="cpu-16").memory.static_bytes

    model = builder.build(config("qwen3_8b"), None)[0]
    assert static("acceptance.bound=0.02") - static() == 8 * -(-model.parameters // model.dense_replicas)


@pytest.mark.slow
def test_sampling_masks_are_counted_at_their_bound(plan_of):
    plain, truncated = plan_of("qwen3_8b"), plan_of("qwen3_8b", "rollout.top_p=0.95", "rollout.top_k=50")
    made = config("qwen3_8b").rollout
    tokens = made.prompts_per_step * made.group_size * made.max_response_tokens
    more = truncated.totals.bank_bytes_per_step - plain.totals.bank_bytes_per_step
    assert more == pytest.approx(4 * 51 * tokens, rel=1e-3)  # and the entries of the headers
    assert truncated.memory.static_bytes > plain.memory.static_bytes
    assert "sampling masks" in report(truncated, [])
    assert "sampling masks" not in report(plain, [])


def test_teachers_are_counted_in_bank_batch_and_gpus(plan_of):
    """8 bytes for each listed token and 4 for the sampled one; a teacher has its own GPUs."""
    model = EXAMPLES / "models" / "qwen3-30b-a3b"
    taught = [f"distillation.teachers={{t: {{path: {model}, tensor_parallel: 2}}}}", "distillation.topk=20"]
    taught.append("rollout.temperature=1.0")
    plain, plan = plan_of("qwen3_8b", nodes=3), plan_of("qwen3_8b", *taught, nodes=3)
    r = plan.config.rollout
    tokens = r.prompts_per_step * r.group_size * r.max_response_tokens
    more = plan.totals.bank_bytes_per_step - plain.totals.bank_bytes_per_step
    assert more == pytest.approx(tokens * (20 * 8 + 4), rel=0.01)
    batch = [next(i.bytes for i in p.memory.static if i.name == "batch") for p in (plain, plan)]
    assert batch[1] - batch[0] == pytest.approx(plan.load.tokens * plan.load.micro_batches * 21 * 8)
    (note,) = [note for note in plan.notes if note.startswith("distillation")]
    assert note == "distillation.teachers.t: 28.4 GiB of weights on each device"

    model = EXAMPLES / "models" / "qwen3-8b"
    own = plan_of("qwen3_8b", f"distillation.teachers={{t: {{path: {model}, in_trainer: true}}}}", nodes=3)
    assert own.totals.bank_bytes_per_step == plain.totals.bank_bytes_per_step  # no lists
    sizes = {item.name: item.bytes for item in own.memory.static}
    assert sizes["teacher"] == pytest.approx(sizes["parameters"], rel=0.02)  # the policy itself


def test_advice_of_several_settings_can_be_pasted():
    """Doubling the tensor-parallel size needs sequence parallelism: both are options of their own."""
    change = Advice({"parallel.tensor": 4, "parallel.sequence": True}, 1, True, "nothing")
    arguments = ["plan", str(EXAMPLES / "qwen3_8b" / "config.yaml"), "--nodes", "2", "--gpus-per-node", "1"]
    shown = CliRunner().invoke(app, [*arguments, "--gpu", "h100-80", *shlex.split(str(change))])
    assert isinstance(shown.exception, ConfigError)  # of the plan, not of the options: exit code 2 without an exception


def test_publishing_counts_the_buckets_of_its_transport(plan_of):
    def publishing(*sets: str) -> int:
        memory = plan_of("qwen3_8b", "weight_sync.transport=broadcast", *sets).memory
        return sum(item.bytes for item in memory.phases["publishing weights"])

    # Tensor 2: own shards, two gathered, two whole; and two buffers to send from, of the embedding as it is sent.
    embedding = 2 * 152_064 * 4096  # padded
    assert publishing() == 5 * embedding // 2 + 2 * embedding
    assert publishing("weight_sync.bucket_bytes=4294967296") == 5 * (4 << 30) + 2 * (4 << 30)


def test_planned_disk_space_covers_the_kept_checkpoints_and_versions(plan_of):
    def disk(*sets: str) -> str:
        return next(line for line in report(plan_of("qwen3_8b", *sets), []).splitlines() if line.startswith("disk: "))

    stored = ["weight_sync.transport=shared_storage", "weight_sync.keep_versions=1"]
    assert "checkpoints 4 x 106.8 GiB, published versions 2 x 15.3 GiB" in disk("checkpoint.keep=3", *stored)
    memory = "weight_sync.directory=/shared/mine"
    assert "published versions 2 x 15.3 GiB in /shared/mine" in disk(memory, *stored)
    assert "published versions 2 x 8." in disk("engine.quantization=fp8_block", *stored)
    assert "published" not in disk("weight_sync.transport=broadcast")


def test_disk_has_the_answers_of_evaluations(plan_of):
    sets = ["eval.sets={aime: {path: a.jsonl, n: 32, temperature: 0.7, max_response_tokens: 8000}}"]
    plan = plan_of("qwen3_8b", "eval.every=15", "train.steps=100", *sets)
    assert plan.totals.evaluations == 8  # 0, 15, ..., 90 and 100
    assert 32 * 8000 * 8 < plan.totals.answer_bytes["aime"] < 32 * 8000 * 8 * 1.05
    assert "answers of aime at most 2.0 MiB a prompt in each of 8 evaluations" in report(plan, [])


@pytest.mark.slow
def test_frozen_weights_have_no_planned_gradient_optimizer_state_or_reference_copy(plan_of):
    """r (inputs + outputs) for each projection of 36 layers of Qwen3-8B; a checkpoint holds 14 bytes of each."""
    objective = ["objective.settings={reference_kl: k3, reference_kl_coefficient: 0.1}"]
    adapters = 36 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    whole = ("parallel.tensor=1", "parallel.sequence=false")
    plan = plan_of("qwen3_8b", "model.lora.r=8", *whole, *objective, gpu="h200-141")
    items = {item.name: item.bytes for item in plan.memory.static}
    assert items["gradients"] == 4 * adapters
    assert items["Adam moments"] == 8 * adapters // 8
    assert items["parameters"] > 2 * plan.totals.parameters
    assert "reference policy" not in items
    assert plan.totals.checkpoint_bytes == 14 * adapters
    assert plan.totals.published_bytes == 2 * plan.totals.parameters
    alone = ("model.lora.r=8", "weight_sync.lora=adapter", "weight_sync.transport=shared_storage")
    assert plan_of("qwen3_8b", *alone, gpu="h200-141").totals.published_bytes == 2 * adapters
