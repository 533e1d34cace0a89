"""Checks `engine` and `weight_sync`. Rules for an engine kind are in `rollout/engines/<kind>/kind.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dppo_megatron.common.environment import child_environment
from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.kinds import kind_of

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig

LAST_PORT = 65535
SPECULATIVE = ("--speculative", "--spec-", "-sc")  # vLLM's and SGLang's flags
OF_ONE_MACHINE = ("/dev/shm", "/run", "/tmp")
MAX_LORA_RANK = 512
MAX_SENDERS = 32  # each sender needs a communicator with buffers in every engine worker
LARGEST_TOLERANCE = 1.0  # nats; FP8 needs it, and other models differ by more
ANSWER_S = 25.0  # an interpreter on a slow file system needs seconds to find a package


def problems(config: Config) -> Iterator[str]:
    if config.objective.supervised:
        return
    e = config.engine
    if e.urls and e.count != 1 and e.count != len(e.urls):
        yield f"engine.count = {e.count}: engine.urls names {len(e.urls)} engines; remove engine.count"
    if len(set(e.urls)) < len(e.urls):
        yield f"engine.urls = {', '.join(e.urls)}: each must be another server; remove the repeated one"
    if (last := e.port + config.started_engines - 1) > LAST_PORT:
        overflow = f"with engine.count = {e.count} the last port would be {last}, above {LAST_PORT}"
        yield f"engine.port = {e.port}: {overflow}; set it to a lower one, or to 0 for free ones"
    if not config.weight_sync.fingerprint and config.probe_tolerance > LARGEST_TOLERANCE:
        setting = f"weight_sync.probe_tolerance = {config.probe_tolerance:g}"
        yield f"{setting}: no check would notice wrong weights; lower it, or set weight_sync.fingerprint to true"
    if flags := [argument for argument in e.extra_args if argument.startswith(SPECULATIVE)]:
        reason = "changes the tokens of a seed, and with some settings their distribution"
        remedy = "remove it, or set engine.draft_tokens"
        yield f"engine.extra_args = {flags[0]}: a server's own speculative decoding {reason}; {remedy}"
    if flags := [argument for argument in e.extra_args if re.match(r"-[^\s=]+\s", argument)]:
        entries = ", ".join(flags[0].split())
        yield f"engine.extra_args = {flags[0]}: one entry has an option and its value; write [{entries}]"
    yield from kind_of(config).problems(config)
    if e.placement == "colocated":
        yield from _colocated(config)
    for part in (_layout, _transport, _directory, _deltas, _quantization, _adapters):
        yield from part(config)


def _layout(config: Config) -> Iterator[str]:
    """Yield problems of an engine's GPU layout."""
    e = config.engine
    if e.devices % e.nodes:
        gpus = f"an engine's {e.devices} GPUs (engine.tensor_parallel x engine.pipeline_parallel)"
        yield f"engine.nodes = {e.nodes}: does not divide {gpus}; change one of them"
    if e.pipeline_parallel > 1 and config.weight_sync.lora == "adapter":
        yield (
            f"engine.pipeline_parallel = {e.pipeline_parallel}: adapters are untested with pipeline stages "
            "(weight_sync.lora = adapter); set it to 1 and use engine.tensor_parallel"
        )


def _colocated(config: Config) -> Iterator[str]:
    e = config.engine
    if config.weight_sync.transport == "broadcast":
        yield (
            "weight_sync.transport = broadcast: NCCL does not connect two processes on one GPU, as with "
            "engine.placement = colocated; set it to shared_storage (a run directory in memory is as fast)"
        )
    if e.urls:
        yield "engine.urls: a run starts colocated engines itself; remove it, or change engine.placement"


def _transport(config: Config) -> Iterator[str]:
    senders = config.parallel.pipeline * config.parallel.expert
    if config.samples and config.weight_sync.transport == "broadcast" and senders > MAX_SENDERS:
        yield (
            f"weight_sync.transport = broadcast: parallel.pipeline x parallel.expert = {senders} ranks send weights, "
            f"and every engine worker would be in a group with each of them (at most {MAX_SENDERS}); set it to "
            "shared_storage"
        )


def _directory(config: Config) -> Iterator[str]:
    directory, nodes = config.weight_sync.directory, config.slurm.trainer_nodes + config.slurm.engine_nodes
    for root in OF_ONE_MACHINE:
        if config.samples and nodes > 1 and directory is not None and directory.absolute().is_relative_to(root):
            reason = f"each machine has its own {root}, but the run has {nodes} nodes"
            yield f"weight_sync.directory = {directory}: {reason}; remove it"


def _deltas(config: Config) -> list[str]:
    w = config.weight_sync
    if not config.samples or w.full_every == 1:
        return []
    wrong = {
        "a broadcast always sends all weights, because ranks and engine workers keep no copy of the previous version "
        "(weight_sync.transport = broadcast)": w.transport == "broadcast",
        "adapters are published as they are (weight_sync.lora = adapter)": w.lora == "adapter",
        "if an engine rejects a delta, the actor must write the whole model again, but it has released its device to "
        "the engines (engine.placement = colocated)": config.engine.placement == "colocated",
    }
    setting = f"weight_sync.full_every = {w.full_every}"
    return [f"{setting}: {reason}; set it to 1" for reason, holds in wrong.items() if holds]


def _quantization(config: Config) -> Iterator[str]:
    e = config.engine
    if e.serves_fp8 and e.dtype == "fp32":
        yield (
            f"engine.dtype = fp32: tensors that engine.quantization = {e.quantization} leaves unquantized must be bf16 "
            "or fp16; set engine.dtype to bf16"
        )


def _adapters(config: Config) -> list[str]:
    if not config.samples or config.weight_sync.lora == "merged":
        return []
    e, m, broadcast = config.engine, config.model, config.weight_sync.transport == "broadcast"
    wrong = {
        "the run trains no adapters (model.lora.r = 0)": not m.lora.r,
        f"engines take adapters of r at most {MAX_LORA_RANK} (model.lora.r = {m.lora.r})": m.lora.r > MAX_LORA_RANK,
        f"FP8 weights are made at each publish (engine.quantization = {e.quantization})": e.quantization != "none",
        "sleeping engines release their weights (engine.placement = colocated)": e.placement == "colocated",
        "adapters are sent as files (weight_sync.transport = broadcast)": broadcast,
        "engines start from model.path, the trainer from model.weights": m.weights is not None,
    }
    return [f"weight_sync.lora = adapter: {reason}; set it to merged" for reason, holds in wrong.items() if holds]


def model_problems(config: Config, hf: HFModelConfig | None) -> Iterator[str]:
    """Yield why engines cannot serve the model. All kinds split attention by whole heads, and FP8 by whole blocks.

    `hf` is the model's config.json, or None if it cannot be read.
    """
    from dppo_megatron.hf import fp8

    if not config.samples or hf is None:
        return
    yield from kind_of(config).model_problems(config, hf)
    engine, positions = config.engine, hf.max_position_embeddings
    longest = config.too_long(positions)
    if longest or engine.max_model_len > positions:
        wrong = longest or f"engine.max_model_len = {engine.max_model_len}"
        remedy = "lower one of them" if longest else "remove it, or lower it to that"
        yield f"{wrong}: the model supports {positions} positions (max_position_embeddings); {remedy}"
    if unknown := [token for token in config.rollout.stop_token_ids if token >= hf.vocab_size]:
        yield (
            f"rollout.stop_token_ids = {unknown[0]}: the model has the tokens 0 to {hf.vocab_size - 1}, so no response "
            "would stop there; correct or remove it"
        )
    if (k := config.rollout.topk_logprobs) > hf.vocab_size:
        yield f"rollout.topk_logprobs = {k}: the model has {hf.vocab_size} tokens; set it to at most that"
    if config.weight_sync.lora == "adapter" and any((hf.moe, hf.mla, hf.delta_net)):
        yield (
            "weight_sync.lora = adapter: the engines support no adapters of experts or of latent attention, and those "
            "of gated delta net are not tested; set it to merged"
        )
    tensor, kv_heads = engine.tensor_parallel, hf.num_kv_heads
    if hf.num_heads % tensor:
        yield f"engine.tensor_parallel = {tensor}: does not divide {hf.num_heads} attention heads; lower it"
    elif hf.mla is None and kv_heads % tensor and tensor % kv_heads:
        yield (
            f"engine.tensor_parallel = {tensor}: {kv_heads} key-value heads are neither a multiple nor a divisor of "
            "it; change it"
        )
    if engine.pipeline_parallel > hf.num_layers:
        yield f"engine.pipeline_parallel = {engine.pipeline_parallel}: the model has {hf.num_layers} layers; lower it"
    if engine.expert_parallel and (hf.moe is None or hf.moe.num_experts % tensor):
        experts = 0 if hf.moe is None else hf.moe.num_experts
        yield f"engine.expert_parallel = true: {tensor} GPUs cannot share {experts} experts evenly; set it to false"
    if engine.serves_fp8:
        yield from (
            f"engine.tensor_parallel = {tensor}: shards {name} = {width} into parts that are no multiple of the "
            f"{fp8.BLOCK} values of an FP8 block; {'lower it, or ' * (tensor > 1)}set engine.quantization to none"
            for name, width in _feed_forwards(hf).items()
            if width % (tensor * fp8.BLOCK) and not (engine.expert_parallel and name.startswith("moe"))
        )


def _feed_forwards(hf: HFModelConfig) -> dict[str, int]:
    """Return the model's feed-forward widths by config.json name."""
    if hf.moe is None:
        return {"intermediate_size": hf.ffn_hidden_size}
    widths = {"moe_intermediate_size": hf.moe.ffn_hidden_size}
    if not all(hf.moe.layers):
        widths["intermediate_size"] = hf.ffn_hidden_size
    return widths


def environment_problems(config: Config, *, elsewhere: bool = False) -> list[str]:
    """Return why this environment cannot start engines, or cannot read `engine.secret_file`.

    Starts the interpreter to look for engine packages without importing them. `elsewhere` means that the run has other
    devices than this machine.
    """
    from dppo_megatron.rollout.engines.serving import device_here

    secret, out = config.engine.secret_file, []
    if secret is not None and not (secret.is_file() and os.access(secret, os.R_OK)):
        out.append(
            f"engine.secret_file = {secret}: not a readable file; it contains the DPPO_SECRET of the servers of "
            "engine.urls. Remove the setting if the run starts its engines"
        )
    if not config.started_engines:
        return out
    kind, name = kind_of(config), config.engine.kind
    python = str(kind.python(config))
    remedy = f"install {name} there, or set engine.python to the interpreter of an environment that has it"
    remedy += kind.install
    cuda = config.slurm.gpus_per_node > 0 if elsewhere else device_here() == "cuda"
    packages = {f"{name}=={kind.package_version}": f"engine.kind = {name}: {{python}} has no {{package}}; {remedy}"}
    try:
        for package, problem in (packages | kind.more_packages(config, cuda=cuda)).items():
            if not _finds(python, package):
                return [*out, problem.format(python=python, package=package)]
    except OSError as error:
        out.append(f"engine.python = {python}: cannot be run ({error}); {remedy}")
    return out


def _finds(python: str, package: str) -> bool:
    """Return whether an interpreter has a package. NAME==0.32 also admits 0.32.1, and a package without a version."""
    name, _, version = package.partition("==")
    look = "import sys; from importlib import metadata as m, util; of = "
    look += f"m.packages_distributions().get({name!r}, ()) if {version!r} else (); "
    look += f"sys.exit(util.find_spec({name!r}) is None or not all(m.version(d).startswith({version!r}) for d in of))"
    null, environment = subprocess.DEVNULL, child_environment(server=True)  # output may be endless
    with subprocess.Popen(
        [python, "-c", look], stdin=null, stdout=null, stderr=null, start_new_session=True, env=environment
    ) as process:
        try:
            return process.wait(ANSWER_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and its child processes
            raise OSError(f"no answer in {ANSWER_S:g} s") from None
