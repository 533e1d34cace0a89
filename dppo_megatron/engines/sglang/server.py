"""Command line and environment of an SGLang server for a run. Pure functions: nothing is started here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config.schema import Config
from dppo_megatron.engines.serving import CPU_KV_CACHE_BYTES, Device, Node, cpu_threads, device_here
from dppo_megatron.hf import read_hf_config

from .client import CONTEXT_MARGIN

# dppo_megatron.engines.guard.sglang_server, which SGLang's own environment may not know by that name.
GUARDED_SERVER = Path(__file__).parents[1] / "guard" / "sglang_server.py"
PLUGIN = Path(__file__).parent / "plugin"  # holds the metadata by which SGLang finds it
CPU_ENVIRONMENT = Path(__file__).parent / "cpu"


def sglang_python(config: Config) -> Path:
    """The interpreter that has SGLang: `engine.python`, else that of `.venv-sglang` beside this environment, else
    this one. SGLang and vLLM pin different versions of the same packages."""
    if config.engine.python is not None:
        return config.engine.python
    own = Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def sglang_command(
    config: Config, port: int, model_path: Path, version: int, node: Node | None = None, *, device: Device | None = None
) -> list[str]:
    """The server's argv; it starts with policy `version`. `device` defaults to CUDA where this process sees one.

    `config.engine.extra_args` come last and win.
    """
    engine = config.engine
    command = [
        *(str(sglang_python(config)), str(GUARDED_SERVER)),
        *("--model-path", str(model_path)),
        # Another node's server answers health checks there, also where it is on the same machine.
        *("--host", engine.host, "--port", str(port + (node.rank if node is not None else 0))),
        *("--dtype", DTYPES[engine.dtype].long),
        *("--tp-size", str(engine.tensor_parallel)),
        *("--context-length", str(engine.max_model_len + CONTEXT_MARGIN)),
        *("--max-running-requests", str(engine.max_num_seqs)),
        *("--weight-version", str(version)),
        "--skip-tokenizer-init",  # tokens in, tokens out
        *("--log-level-http", "warning"),
    ]
    if engine.expert_parallel:
        command += ["--ep-size", str(engine.tensor_parallel)]
    if node is not None:
        command += ["--nnodes", str(engine.nodes), "--node-rank", str(node.rank)]
        command += ["--dist-init-addr", f"{node.host}:{node.port}"]
    if engine.seeded:
        command.append("--enable-deterministic-inference")  # without it samples ignore their seeds
    if config.rollout.routing_replay:
        command.append("--enable-return-routed-experts")
    if config.rollout.top_k > 0:  # equal probabilities may leave more; a request with still more is aborted
        command += ["--sampling-mask-max-tokens", str(max(4096, 2 * config.rollout.top_k))]
    cpu = (device or device_here()) == "cpu"
    if config.weight_sync.lora == "adapter":
        lora = config.model.lora
        command += [
            *("--enable-lora", "--max-loras-per-batch", "1", "--max-lora-rank", str(lora.r), "--lora-strict-loading"),
            *("--lora-target-modules", *sorted({target.rpartition(".")[2] for target in lora.targets})),
            *(("--lora-backend", "torch_native") if cpu else ()),
        ]
    if engine.placement == "colocated" and not cpu:
        command.append("--enable-memory-saver")  # without it sleep frees nothing
    if engine.kv_cache_bytes is not None or cpu:
        tokens = (engine.kv_cache_bytes or CPU_KV_CACHE_BYTES) // _kv_bytes_per_token(config, model_path)
        command += ["--max-total-tokens", str(tokens)]
    if cpu:
        command += [
            *("--device", "cpu"),
            *("--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch"),
            *("--grammar-backend", "none"),
            *("--mem-fraction-static", "0.5"),
            "--disable-overlap-schedule",
            "--disable-cuda-graph",
            "--disable-radix-cache",
            "--skip-server-warmup",
            "--sleep-on-idle",  # else it takes half a core while the trainer computes
        ]
    return [*command, *engine.extra_args]


def sglang_environment(config: Config, _version: int, *, device: Device | None = None) -> dict[str, str]:
    """Variables to add to the server's environment; its command line holds the version. `config.engine.env` wins."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PLUGIN),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs of the sampled distribution
        # max_position_embeddings may equal engine.max_model_len; the margin is never filled.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if config.engine.host in ("127.0.0.1", "localhost"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if (device or device_here()) == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": f"{CPU_ENVIRONMENT}{os.pathsep}{PLUGIN}",
            "TORCHDYNAMO_DISABLE": "1",  # one small function, for which a compiler would have to be there
            **cpu_threads(config),
        }
    return environment | config.engine.env


def _kv_bytes_per_token(config: Config, model_path: Path) -> int:
    """On one GPU of the engine."""
    model = read_hf_config(model_path)
    if model.mla is not None:
        per_layer = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        # Each GPU has its share of the heads, one at least.
        per_layer = 2 * max(1, model.num_kv_heads // config.engine.tensor_parallel) * model.head_dim
    return model.num_layers * per_layer * DTYPES[config.engine.dtype].bytes
