"""The one typed tree of settings. Every field is described once, here; defaults are the DPPO paper's where it has one.

Rules of one field stand here, rules between fields in `dppo_megatron.checks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from dppo_megatron.common.dtypes import FloatName

from .acceptance import AcceptanceConfig
from .data import DataConfig
from .environment import EnvironmentConfig
from .evaluation import HELDOUT, EvalConfig, EvalSet
from .lora import LoraConfig
from .loss_scale import LossScaleConfig
from .objective import ObjectiveConfig
from .reward import RewardConfig
from .rollout import RolloutConfig
from .section import (
    Bytes,
    Count,
    CountFromZero,
    EnvironmentName,
    FilePath,
    Float,
    Int,
    Positive,
    Processes,
    Seconds,
    Section,
    Url,
)
from .slurm import SlurmConfig
from .weight_sync import WeightSyncConfig


class RunConfig(Section):
    dir: FilePath = Field(description="run directory: resolved config, bank, weights, checkpoints, logs, metrics")
    seed: Int = Field(1, ge=0, lt=1 << 32, description="seeds prompt order, sampling and dropout")
    stall_timeout_s: Seconds = Field(1800.0, description="a wait without progress longer than this raises")


class ModelConfig(Section):
    path: FilePath = Field(description="Hugging Face model directory (config.json, safetensors, tokenizer)")
    weights: FilePath | None = Field(
        None,
        description="start from these weights of the same model instead: a Megatron checkpoint that `convert` made or "
        "a run's checkpoints/step-N, saved in whatever layout",
    )
    dtype: FloatName = Field("bf16", description="parameters and activations; the optimizer is fp32")
    logits: Literal["stored", "fused"] = Field(
        "stored",
        description="stored: head output kept for the loss; fused: head and loss in one pass, less memory",
    )
    recompute: Literal["none", "selective", "full"] = Field("none", description="activation recompute")
    fp8: Literal["none", "tensorwise", "blockwise", "mxfp8"] = Field(
        "none", description="TransformerEngine's FP8 recipe for the layers' matrix products; needs bf16 and a GPU"
    )
    fp32_head: bool = Field(False, description="project to logits in fp32 whatever the dtype; stored logits only")
    batch_invariant_head: bool = Field(
        False, description="log-probs of a token do not depend on what is packed beside it, given its hidden state"
    )
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="layer implementation; auto = TransformerEngine on CUDA where installed, else local",
    )
    router_dtype: Literal["fp32", "model"] = Field(
        "fp32", description="MoE: precision of router scores and expert weights; model = that of `dtype`"
    )
    lora: LoraConfig = LoraConfig()

    @property
    def start(self) -> Path:
        """Where the weights are that training starts from."""
        return self.weights or self.path

    @property
    def computes_in(self) -> str:
        """Name of the dtype of the layers' matrix products."""
        return self.dtype if self.fp8 == "none" else "fp8"


class ParallelConfig(Section):
    world_size: Processes = Field(1, description="trainer ranks; data-parallel size follows from the rest")
    tensor: Processes = Field(1, description="ranks that share every layer's matrices")
    pipeline: Processes = Field(1, description="stages into which the layers are split")
    virtual_pipeline: Count | None = Field(None, ge=2, description="model chunks per pipeline rank (interleaved)")
    first_stage_layers: Count | None = Field(
        None, description="layers of the first pipeline rank; default: as many as each other rank"
    )
    last_stage_layers: Count | None = Field(None, description="layers of the last pipeline rank, likewise")
    context: Processes = Field(1, description="ranks that share every sequence")
    expert: Processes = Field(1, description="MoE: ranks that share the experts of a layer")
    expert_tensor: Processes | None = Field(None, description="tensor parallelism of the experts; default: tensor")
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="how tokens reach the experts of other ranks; allgather suits few experts per rank"
    )
    sequence: bool = Field(False, description="sequence parallelism; needs tensor > 1")
    distributed_optimizer: bool = Field(True, description="shard optimizer state over data-parallel ranks")
    overlap: bool | None = Field(
        None,
        description="reduce gradients over data-parallel ranks during the backward pass, and between the updates of a "
        "step gather new parameters during the forward pass; default: on CUDA",
    )
    timeout_s: Seconds = Field(600.0, description="a collective that takes longer raises")


class OptimizerConfig(Section):
    lr: Positive = Field(1e-6, description="learning rate of Adam; adapters and tiny models need 1e-4 to 1e-3")
    min_lr: Float = Field(0.0, ge=0, le=1e6, description="learning rate at which a decay ends")
    warmup_updates: CountFromZero = Field(0, description="optimizer updates of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="of lr, down to min_lr at the end")
    weight_decay: Float = Field(0.0, ge=0, le=1e6, description="decoupled, as in AdamW")
    beta1: Float = Field(0.9, ge=0, lt=1, description="Adam's decay of the mean of gradients")
    beta2: Float = Field(0.95, ge=0, lt=1, description="Adam's decay of the mean of their squares")
    eps: Float = Field(1e-8, ge=1e-30, le=1, description="smaller is 0 in fp32, and an update then 0 / 0")
    grad_clip: Float = Field(1.0, ge=0, le=1e12, description="global gradient norm; 0 = off")
    offload: bool = Field(
        False,
        description="keep main parameters and Adam states on the host between optimizer steps; each step moves them "
        "to the GPU and back",
    )
    max_skipped_in_a_row: Count = Field(
        5, description="stop after so many updates skipped for non-finite gradients, which no smaller scale could mend"
    )
    loss_scale: LossScaleConfig = LossScaleConfig()


class TrainConfig(Section):
    steps: Count = Field(description="rollout batches to train on (policy versions)")
    updates_per_step: Count = Field(1, description="optimizer updates per rollout batch")
    micro_batch_tokens: Count = Field(8192, description="packed tokens per forward-backward on one rank")
    share_prefixes: bool | None = Field(
        None,
        description="samples of a prompt that are in one micro-batch compute it once; default: where the layers can",
    )


class EngineConfig(Section):
    kind: Literal["vllm", "sglang"] = Field("vllm", description="the inference server")
    urls: tuple[Url, ...] = Field((), description="engines already running; empty = started with the run")
    secret_file: Path | None = Field(
        None, description="what requests must bring to the engines is in this file; default: RUN/secret, which is made"
    )
    count: Processes = Field(1, description="engines to start when urls is empty")
    tensor_parallel: Processes = Field(1, description="GPUs over which an engine shards each layer")
    pipeline_parallel: Processes = Field(
        1, description="stages into which an engine splits its layers, each on tensor_parallel GPUs; for vllm"
    )
    expert_parallel: bool = Field(
        False, description="each GPU of an engine stores whole experts; false: a slice of every expert"
    )
    nodes: Processes = Field(1, description="nodes that one engine spans, with equally many of its GPUs on each")
    placement: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="disaggregated: engines have GPUs of their own; colocated: they share the trainer's and sleep, "
        "their memory given back, while it trains",
    )
    python: FilePath | None = Field(
        None,
        description="interpreter of the engine's own environment; default: .venv-sglang beside this one for sglang, "
        "else this one",
    )
    host: str = Field("127.0.0.1", description="address at which started engines listen")
    port: CountFromZero = Field(0, le=65535, description="first port; 0 = a free one")
    dtype: FloatName | None = Field(None, description="default: model.dtype")
    quantization: Literal["none", "fp8_block", "fp8_block_emulated"] = Field(
        "none",
        description="fp8_block: every publish quantises the layers' projections to FP8 (e4m3, a scale for 128 x 128 "
        "values) and engines multiply in FP8; needs GPUs. fp8_block_emulated: the same rounding of the weights, which "
        "engines hold and multiply in engine.dtype; to study the mismatch, not to save memory",
    )
    max_model_len: Count | None = Field(None, ge=2, description="default: data.max_prompt_tokens + longest response")
    max_num_seqs: Count = Field(256, description="sequences that an engine samples at once")
    kv_cache_bytes: Bytes | None = Field(None, description="on each GPU; default: the engine's choice, 1 GiB on CPUs")
    max_logprobs: Count = Field(64, description="the engine's cap on top-K log-probs per token")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field("processed_logprobs", description="not raw")
    seeded: bool = Field(
        True,
        description="a sample's tokens follow from its seed, so that a request sent again draws the same; SGLang needs "
        "batch-invariant kernels for it, which cost speed, and with false draws from the same distribution without",
    )
    exact: bool = Field(
        False,
        description="engine and trainer compute by the same operators, so that their log-probs agree bit by bit; on "
        "CPUs, for dense models; costs speed on both sides",
    )
    extra_args: tuple[str, ...] = Field((), description="appended to the server's command line")
    env: dict[EnvironmentName, str] = Field(default_factory=dict, description="environment variables of the server")
    start_timeout_s: Seconds = Field(600.0, description="an engine that does not answer by then has failed")
    request_timeout_s: Seconds | None = Field(
        None,
        description="a group not answered for so long, waiting in the engine's queue included, is sent again; "
        "default: 600 s and 0.5 s for each token that a response may have",
    )
    health_interval_s: Seconds = Field(2.0, description="time between health checks of an engine")
    health_timeout_s: Seconds = Field(10.0, description="a health check that takes longer has failed")
    health_failures: Count = Field(
        3,
        description="failed health checks, or failed requests, in a row after which an engine is dead and its requests "
        "go elsewhere; a server that fails twice as many checks is ended, and restarted if the run started it",
    )
    unavailable_timeout_s: Seconds = Field(
        900.0, description="waiting longer than this for any engine to serve raises; a restart must fit in it"
    )
    restarts: CountFromZero = Field(
        5, description="restarts in a row of an engine that the run started; one more end ends the run"
    )

    @property
    def devices(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def devices_per_node(self) -> int:
        """GPUs of one engine on each of its nodes."""
        return self.devices // self.nodes

    @property
    def serves_fp8(self) -> bool:
        """Whether the engines' own weights are FP8, and not only rounded as FP8 would."""
        return self.quantization == "fp8_block"


class CheckpointConfig(Section):
    every: CountFromZero = Field(50, description="steps between checkpoints; 0 = only at the end")
    keep: Count = Field(2, description="newest checkpoints that stay on disk")
    keep_rollouts: CountFromZero | None = Field(
        None,
        description="steps before the newest checkpoint whose rollouts stay in the bank, besides those that a resume "
        "from a kept checkpoint needs; default: all of the run",
    )
    asynchronous: bool = Field(
        False, description="go on training while a checkpoint is written; costs a host copy of this rank's part"
    )
    timeout_s: Seconds = Field(
        1800.0, description="asynchronous: a write of which nothing reaches the disk for longer raises"
    )


class TrackingConfig(Section):
    tensorboard: bool = Field(False, description="write RUN/tensorboard")
    wandb: Literal["off", "offline", "online"] = Field("off", description="log to Weights & Biases")
    wandb_project: str = Field("dppo_megatron", description="project of the run there")
    wandb_name: str | None = Field(None, description="name of the run there; default: that of run.dir")
    token_sequences: CountFromZero = Field(
        0,
        description="sequences of each step of which RUN/tokens keeps the trainer's log-prob, entropy, divergence and "
        "mask of every token, for `dppo-megatron view`; 17 bytes a token",
    )


class ProfileConfig(Section):
    steps: tuple[Count, ...] = Field((), description="steps to trace, counted from 1 as in the metrics, e.g. [3]")
    ranks: tuple[CountFromZero, ...] = Field((0,), description="trainer ranks that write RUN/profile/step_N_rank_R")
    memory: bool = Field(False, description="also write a snapshot of CUDA memory at the end of each of these steps")


class Config(Section):
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig
    acceptance: AcceptanceConfig = AcceptanceConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _derive(self) -> Self:
        e, longest = self.engine, self.data.max_prompt_tokens + max(self.response_tokens.values())
        own = {"dtype": e.dtype or self.model.dtype, "max_model_len": e.max_model_len or longest}
        object.__setattr__(self, "engine", e.model_copy(update=own))  # frozen for callers
        return self

    @property
    def horizon(self) -> int:
        return self.objective.horizon or self.rollout.max_response_tokens

    @property
    def probe_tolerance(self) -> float:
        """Largest mean difference between log-probs of engine and trainer, in nats, that their precisions explain."""
        if self.weight_sync.probe_tolerance is not None:
            return self.weight_sync.probe_tolerance
        if self.engine.exact:
            return 0.0
        if self.engine.quantization != "none" or self.model.fp8 != "none":
            return 1.0
        # An fp16 number has three bits more than a bf16 one, so its rounding is an eighth.
        tolerance = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.3}
        return max(tolerance[self.model.dtype], tolerance[self.engine.dtype or self.model.dtype])

    @property
    def samples(self) -> bool:
        """True when the run samples rollouts: it has engines and an orchestrator, and publishes weights to them."""
        return not self.objective.supervised and self.rollout.bank is None

    @property
    def started_engines(self) -> int:
        """Engines that the run starts itself."""
        return self.engine.count if self.samples and not self.engine.urls else 0

    @property
    def engine_devices(self) -> int:
        """GPUs of the engines that the run starts."""
        return self.started_engines * self.engine.devices

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """Every set that is evaluated, by name, with its own or the default length, grader and template."""
        greedy = {"path": self.data.eval, "pass_reward": self.eval.pass_reward}
        heldout = {} if self.data.eval is None else {HELDOUT: EvalSet.model_validate(greedy)}
        longest = self.eval.max_response_tokens or self.rollout.max_response_tokens
        return {
            name: one.model_copy(
                update={
                    "max_response_tokens": one.max_response_tokens or longest,
                    "reward": one.reward or self.reward,
                    "prompt_template": one.prompt_template or self.data.prompt_template,
                }
            )
            for name, one in (heldout | self.eval.sets).items()
        }

    def data_of(self, one: EvalSet) -> DataConfig:
        """How the rows of one of `eval_sets` are read."""
        return self.data.model_copy(update={"prompt_template": one.prompt_template})

    @property
    def response_tokens(self) -> dict[str, int]:
        """By the setting: most tokens of a response that is trained on, or evaluated."""
        lengths = {"rollout.max_response_tokens": self.rollout.max_response_tokens}
        for name, one in self.eval_sets.items():
            own = name in self.eval.sets and self.eval.sets[name].max_response_tokens
            setting = f"eval.sets.{name}" if own else "eval" if self.eval.max_response_tokens else "rollout"
            lengths[f"{setting}.max_response_tokens"] = one.max_response_tokens or 0
        return lengths

    @property
    def request_timeout_s(self) -> float:
        """Seconds that one request to an engine may take."""
        return self.engine.request_timeout_s or 600.0 + 0.5 * max(self.response_tokens.values())

    @property
    def data_parallel(self) -> int:
        p = self.parallel
        return p.world_size // (p.tensor * p.pipeline * p.context)
