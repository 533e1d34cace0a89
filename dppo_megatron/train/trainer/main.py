"""Build one rank's actor, batches and publisher, and run the loop: `dppo-megatron trainer`."""

from __future__ import annotations

import logging
from functools import cache

from dppo_megatron.bank import BankReader
from dppo_megatron.common import heartbeat
from dppo_megatron.common.files import write_json
from dppo_megatron.common.process import raise_open_files_limit
from dppo_megatron.common.ranks import Ranks, authenticate
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptSource, training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.hf import save_hf
from dppo_megatron.hf.peft import save_peft
from dppo_megatron.objectives import ObjectiveProtocol, build_objective
from dppo_megatron.report.logs import setup_logging
from dppo_megatron.report.profiling import phase
from dppo_megatron.rollout.engines.secret import make_secret, read_secret
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.rollout.fleet.registry import engine_urls
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor, Layout, init_layout
from dppo_megatron.train.weight_sync import build_publisher, weight_check_tokens
from dppo_megatron.train.weight_sync.engine_thread import EngineThread

from .acceptance import Acceptance
from .batches import BankBatches, BatchSource, SupervisedBatches, parts_of
from .checkpoints import Checkpoints
from .control import Control
from .loop import Training
from .policy_logprobs import PolicyLogprobs
from .recorder import RankZeroRecorder
from .token_log import TokenLog

log = logging.getLogger(__name__)

OPEN_FILES = 1 << 16  # used if the machine sets no limit: NCCL's connections to other ranks count


def run_trainer(config: Config, *, resume: bool) -> None:
    """Run one trainer rank until `train.steps`, or until the step boundary at which a signal requested a stop.

    Rank, world size and rendezvous come from the environment (torchrun, srun or the local launcher). Raises the errors
    that stop training: `ModelError`, `WeightSyncError`, `BatchTimeout`, `TrainingDiverged`.
    """
    raise_open_files_limit(OPEN_FILES)
    run = RunDir(config.run.dir)
    make_secret(config)
    authenticate(read_secret(config))
    layout = init_layout(config)
    Ranks().begin_attempt()
    setup_logging(f"trainer-{layout.rank}", run.root)
    heartbeat.start(run.heartbeats / f"trainer-{layout.rank}")
    objective = build_objective(config.objective.name, **config.objective.settings)
    control = Control(config.run.stall_timeout_s)
    engines = None
    colocated = config.samples and config.engine.placement == "colocated"
    if colocated:
        engines = _connect(config, run, layout, control)  # engines start on empty GPUs, sleep until the first publish
        if engines is not None:
            engines.put_to_sleep()
        control.barrier()
    actor = Actor(config, layout)
    if layout.rank == 0:
        for line in head(config, actor, objective):
            log.info("%s", line)
    policy_logprobs = PolicyLogprobs(actor, objective)
    checkpoints = Checkpoints(config, actor)
    first_step = checkpoints.load_latest() if resume else None
    if first_step is None:
        actor.load_start()
    log.info("starting at step %d of %d", first_step or 0, config.train.steps)

    # Loaded on first use: importing transformers takes a second, and the whole prompt file is read and tokenized.
    tokenizer = cache(lambda: load_tokenizer(config.model.path))

    def prompts() -> PromptSource:
        return training_prompts(config, tokenizer())

    rank, size = layout.data_parallel_rank, layout.data_parallel_size
    source: BatchSource
    if config.objective.supervised:
        source = SupervisedBatches(config, prompts(), tokenizer(), rank, size)
    else:
        source = BankBatches(
            config,
            BankReader(config.rollout.bank or run.bank),
            objective,
            rank,
            size,
            parts_of(actor, objective),
            share_prefixes=actor.shares_prefixes,
        )
    publisher = None
    if config.samples:
        # Computed before the wait, while the engines start.
        tokens = weight_check_tokens(prompts(), config.engine.max_model_len) if layout.rank == 0 else None
        if not colocated:
            engines = _connect(config, run, layout, control)
        publisher = build_publisher(config, actor, engines, tokens)
    with RankZeroRecorder(config, layout.rank, first_step, lambda token: str(tokenizer().decode([token]))) as recorder:
        recorder.log_missing(first_step, checkpoints.metrics)
        with control, checkpoints:
            num_steps = Training(
                config=config,
                actor=actor,
                objective=objective,
                source=source,
                policy_logprobs=policy_logprobs,
                acceptance=Acceptance(config, actor, objective),
                publisher=publisher,
                checkpoints=checkpoints,
                control=control,
                recorder=recorder,
                token_log=TokenLog(config, layout, first_step),
                step=first_step or 0,
            ).run()
        if num_steps == config.train.steps:
            if colocated and publisher is not None:  # the engines evaluate while the actor is offloaded
                recorder.wait_for_last_evaluation()
                publisher.onload_actor()
            with phase("export"):
                save_hf(actor.model_chunks, run.final_model, template_dir=config.model.path, overwrite=True)
                if config.model.lora.r:
                    base = config.model.start.absolute()
                    save_peft(actor.model_chunks, run.final_adapter, actor.hf, config.model.lora, base, overwrite=True)
            if layout.rank == 0 and not config.checkpoint.final:
                write_json(run.finished, num_steps)
            recorder.wait_for_last_evaluation()
    if publisher is not None:
        publisher.close()
    (run.heartbeats / f"trainer-{layout.rank}").unlink(missing_ok=True)  # the other ranks may need longer
    layout.close()
    log.info("finished %d steps", num_steps)


def _connect(config: Config, run: RunDir, layout: Layout, control: Control) -> EngineThread | None:
    """Create the engine clients on rank 0, which waits for the engines; other ranks wait for rank 0 without a limit."""
    engines = None
    with phase("wait"):
        if layout.rank == 0:
            engine_urls(config, run)
            engines = EngineThread(LiveEngines(config))
        control.barrier()
    return engines


def head(config: Config, actor: Actor, objective: ObjectiveProtocol) -> list[str]:
    """Return the first log lines: the method in words, and the other settings that decide the result."""
    settings = config.objective
    credit = f" of turns (discount {settings.discount:g})" if settings.credit == "turn" else ""
    return [
        *(f"method: {line}" for line in objective.describe().splitlines()),
        f"advantage: {settings.advantage}{credit}, aggregation: {settings.aggregation}, horizon: {config.horizon}",
        *actor.describe(),
    ]
