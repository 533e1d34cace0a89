"""Describe SGLang as a kind of engine: unsupported settings, server command, and memory for an update.

This module starts no process, and imports torch only inside functions that need it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.environment import LOOPBACK
from dppo_megatron.config import Config
from dppo_megatron.config.section import host_and_port
from dppo_megatron.rollout.engines.serving import (
    CPU_KV_CACHE_BYTES,
    CPU_MODULES,
    Device,
    EngineKind,
    Node,
    device_here,
    server_threads,
)

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig
    from dppo_megatron.rollout.engines.byte_budget import ByteBudget
    from dppo_megatron.rollout.engines.protocol import Engine

CUMEM = "NCCL_CUMEM_ENABLE"
MEMORY_SAVER = "torch_memory_saver"  # CUDA package that SGLang needs to free memory when it sleeps
CONTEXT_MARGIN = 8  # positions of --context-length that SGLang reserves and prompt and response cannot use
# dppo_megatron.rollout.engines.guard.sglang_server, started by path: the SGLang environment may lack the package.
GUARDED_SERVER = Path(__file__).parents[1] / "guard" / "sglang_server.py"
PLUGIN = Path(__file__).parent / "plugin"  # contains the metadata by which SGLang finds the plug-in
CPU_ENVIRONMENT = Path(__file__).parent / "cpu"


class Sglang(EngineKind):
    package_version = "0.5.23"
    install = "; `make sglang` builds one for the CPU in .venv-sglang"

    def client(self, config: Config, url: str, budget: ByteBudget | None) -> Engine:
        from .client import SglangEngine

        return SglangEngine(config, url, budget)

    def problems(self, config: Config) -> list[str]:
        e, r, out = config.engine, config.rollout, []
        if e.pipeline_parallel > 1:
            out.append(
                f"engine.pipeline_parallel = {e.pipeline_parallel}: SGLang numbers workers of a broadcast within their "
                "stage (engine.kind = sglang); set it to 1 and use engine.tensor_parallel"
            )
        if e.urls and e.serves_fp8:
            out.append(
                f"engine.quantization = {e.quantization}: excludes engine.urls with SGLang, because weights are "
                "checked against a copy of the model that only a run's own engines have; remove engine.urls or use vllm"
            )
        if e.draft_tokens:
            out.append(
                f"engine.draft_tokens = {e.draft_tokens}: with drafts SGLang samples other tokens for a seed, on CPUs "
                "always the most likely one; set it to 0, or engine.kind to vllm"
            )
        if r.min_p > 0 and e.seeded:
            out.append(
                f"rollout.min_p = {r.min_p}: SGLang draws with seeds or with min_p, and exits if a request has both; "
                "set engine.seeded to false, or min_p to 0"
            )
        if r.routing_replay and config.samples and r.max_staleness and r.on_update == "keep":
            out.append(
                "rollout.on_update = keep: SGLang returns the experts of a request's last prefill, which with "
                "rollout.routing_replay are not those of tokens sampled before an update; set it to abort or wait"
            )
        return out

    def eval_problems(self, config: Config) -> list[str]:
        return [
            f"eval.sets.{name}.top_p = {eval_set.top_p:g}: SGLang would then ignore the seeds of all samples in the "
            "batch, training samples included; set it to 1, or engine.seeded to false"
            for name, eval_set in config.eval.sets.items()
            if eval_set.top_p < 1 and config.engine.seeded
        ]

    def model_problems(self, config: Config, hf: HFModelConfig) -> list[str]:
        from dppo_megatron.hf.peft import adapter_shapes

        lora = config.model.lora
        if hf.sinks is not None:
            return [
                "engine.kind = sglang: weight updates of gpt-oss are not tested with SGLang; set it to vllm, or train "
                "on a stored bank (rollout.bank)"
            ]
        if config.weight_sync.lora != "adapter" or not _lacks_fused_part(adapter_shapes(hf, lora)):
            return []
        return [
            f"model.lora.targets = {', '.join(lora.targets)}: SGLang's fused layers need adapters of q_proj and "
            "v_proj, or of gate_proj; name those too, or set weight_sync.lora to merged"
        ]

    def more_packages(self, config: Config, *, cuda: bool) -> dict[str, str]:
        if config.engine.placement != "colocated" or not cuda:
            return {}
        return {
            MEMORY_SAVER: "engine.placement = colocated: {python} has no package torch_memory_saver, which SGLang "
            "needs to free the memory of weights and cache; install it there (`{python} -m pip install "
            "torch-memory-saver`), set engine.python to the interpreter of an environment that has it, set engine.kind "
            "to vllm, or give the engines GPUs of their own"
        }

    def rank_environment(self, config: Config) -> dict[str, str]:
        # SGLang sets the variable to 0 for itself, and both ends of a broadcast must agree.
        return {CUMEM: config.engine.env.get(CUMEM, "0")} if config.weight_sync.transport == "broadcast" else {}

    def update_bytes(self, module: int, bucket: int, config: Config) -> int:
        return bucket

    def lists_request(self, tokens: list[int], k: int) -> tuple[str, dict[str, Any]]:
        sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
        logprob_options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k}
        return "/generate", {"input_ids": tokens, "sampling_params": sampling, **logprob_options}

    def decode_lists(self, reply: Any, tokens: list[int], k: int) -> tuple[list, list]:
        meta = reply["meta_info"]  # entries are [log-prob, id, text]; the first position has no log-prob
        token_logprobs = [entry[0] for entry, _ in zip(meta["input_token_logprobs"], tokens, strict=True)]
        return token_logprobs[1:], [[(e[1], e[0]) for e in entries] for entries in meta["input_top_logprobs"][1:]]

    def python(self, config: Config) -> Path:
        """Return `engine.python`, else the interpreter of `.venv-sglang` next to this environment, or this interpreter.

        SGLang and vLLM pin different versions of the same packages.
        """
        if config.engine.python is not None:
            return config.engine.python
        interpreter = Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"
        return interpreter if interpreter.exists() else Path(sys.executable)

    def command(
        self,
        config: Config,
        port: int,
        model: Path,
        version: int,
        node: Node | None = None,
        device: Device | None = None,
    ) -> list[str]:
        """Return the server's command line. `device` defaults to `device_here()`.

        `config.engine.extra_args` are appended last, so they override the other options.
        """
        engine = config.engine
        argv = [
            *(str(self.python(config)), str(GUARDED_SERVER)),
            *("--model-path", str(model)),
            # The server of another node answers health checks on a different port, because nodes may share a machine.
            *("--host", engine.host, "--port", str(port + (node.rank if node is not None else 0))),
            *("--dtype", DTYPES[engine.dtype].long),
            *("--tp-size", str(engine.tensor_parallel)),
            *("--context-length", str(engine.max_model_len + CONTEXT_MARGIN)),
            *("--max-running-requests", str(engine.max_num_seqs)),
            *("--weight-version", str(version)),
            "--skip-tokenizer-init",  # requests and replies contain token ids
            *("--log-level-http", "warning"),
        ]
        if engine.expert_parallel:
            argv += ["--ep-size", str(engine.tensor_parallel)]
        if node is not None:
            argv += ["--nnodes", str(engine.nodes), "--node-rank", str(node.rank)]
            argv += ["--dist-init-addr", host_and_port(node.host, node.port)]
        if engine.seeded:
            argv.append("--enable-deterministic-inference")  # without it samples ignore the seeds
        if config.rollout.routing_replay:
            argv.append("--enable-return-routed-experts")
        if config.rollout.top_k > 0:  # ties may leave more than top_k tokens; SGLang aborts a request above this limit
            argv += ["--sampling-mask-max-tokens", str(max(4096, 2 * config.rollout.top_k))]
        cpu = (device or device_here()) == "cpu"
        if config.weight_sync.lora == "adapter":
            lora = config.model.lora
            argv += [
                *("--enable-lora", "--max-loras-per-batch", "1"),
                *("--max-lora-rank", str(lora.r), "--lora-strict-loading"),
                *("--lora-target-modules", *sorted({target.rpartition(".")[2] for target in lora.targets})),
                *(("--lora-backend", "torch_native") if cpu else ()),
            ]
        if engine.placement == "colocated" and not cpu:
            argv.append("--enable-memory-saver")  # without it sleep frees no memory
        if engine.kv_cache_bytes is not None or cpu:
            tokens = (engine.kv_cache_bytes or CPU_KV_CACHE_BYTES) // _kv_bytes_per_token(config, model)
            argv += ["--max-total-tokens", str(tokens)]
        if cpu:
            argv += [
                *("--device", "cpu"),
                *("--attention-backend", "torch_native"),
                *("--sampling-backend", "pytorch"),
                *("--grammar-backend", "none"),
                *("--mem-fraction-static", "0.5"),
                "--disable-overlap-schedule",
                "--disable-cuda-graph",
                "--disable-radix-cache",
                "--skip-server-warmup",
                "--sleep-on-idle",  # otherwise it takes half a core while the trainer computes
            ]
        return [*argv, *engine.extra_args]

    def environment(self, config: Config, _version: int, *, device: Device | None = None) -> dict[str, str]:
        """Return the variables to add to the server's environment. `config.engine.env` takes precedence."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(PLUGIN),
            "DPPO_GROUP_TIMEOUT_S": f"{config.weight_sync.timeout_s:g}",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs of the sampled distribution
            # max_position_embeddings may equal engine.max_model_len; the margin is never filled.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        if config.engine.host in LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        if (device or device_here()) == "cpu":
            variables |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "PYTHONPATH": os.pathsep.join(map(str, (CPU_ENVIRONMENT, CPU_MODULES, PLUGIN))),
                "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles only a small function, and that needs a compiler
                **server_threads(config),
            }
        return variables | config.engine.env


def _lacks_fused_part(names: Iterable[str]) -> bool:
    """Return whether an adapter with these tensors (PEFT names) lacks a part that SGLang needs in a fused layer."""
    layers: dict[str, set[str]] = {}
    for name in names:
        block, _, projection = name.partition(".lora_")[0].rpartition(".")
        layers.setdefault(block, set()).add(projection)
    return any(
        ("q_proj" in projections) != ("v_proj" in projections)
        or ("k_proj" in projections and "q_proj" not in projections)
        or ("up_proj" in projections and "gate_proj" not in projections)
        for projections in layers.values()
    )


def _kv_bytes_per_token(config: Config, model_path: Path) -> int:
    """Return how many bytes the keys and values of a token take on each GPU of the engine."""
    from dppo_megatron.hf import read_hf_config

    model = read_hf_config(model_path)
    if model.mla is not None:
        per_layer = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        # Each GPU has a share of the heads, at least one.
        per_layer = 2 * max(1, model.num_kv_heads // config.engine.tensor_parallel) * model.head_dim
    return len(model.attention_layers) * per_layer * DTYPES[config.engine.dtype].bytes
