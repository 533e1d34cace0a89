"""Implements `dppo-megatron certify`: starts an engine and the trainer's ranks on this machine for one measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import numbered_directory, read_json
from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.config import Config, ConfigError, with_settings
from dppo_megatron.config.schema import ObjectiveConfig
from dppo_megatron.convert.files import checkpoint_at
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.run.checks import preflight
from dppo_megatron.run.launch.driver import GRACE_S
from dppo_megatron.run.launch.local_processes import LocalLauncher, rank_plans
from dppo_megatron.run.launch.own_engines import running_engines, with_last_lines
from dppo_megatron.run_dir import RunDir

from .rank import CERTIFICATE, LIMIT_S, PROGRESS

POLL_S = 0.1


class CertifyError(ExpectedError, RuntimeError):
    """Raised when the ranks did not complete the measurement."""


def certify(
    config: Config,
    source: str,
    *,
    prompts: int,
    run: Path | None = None,
    urls: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Path, dict[str, Any]]:
    """Compare `model.path` in an engine and in the trainer's layout; return (certificate path, content).

    The engine is the first of `urls`, by default of `engine.urls`; without URLs, it is started here. With `run`, both
    sides use that run's newest checkpoint, otherwise `model.weights` if set. The trainer loads these weights and
    publishes them to the engine. Raises `ConfigError`, `CertifyError` with the last log lines of a failed rank, and
    errors from `running_engines`.
    """
    checkpoint = config.model.weights if run is None else checkpoint_at(RunDir(run).checkpoints)
    lora = config.model.lora
    if lora.r and (checkpoint is not None or lora.adapter is not None):
        remedy = "compare the run's merged model, RUN/model, as model.path, with model.lora.r=0"
        raise ConfigError(source, [f"model.lora.r = {lora.r}: certify publishes no adapters; {remedy}"])
    engine: dict[str, Any] = {"count": 1, "urls": tuple(urls or config.engine.urls)[:1], "placement": "disaggregated"}
    if engine["urls"]:
        engine["secret_file"] = config.engine.secret_file or RunDir(config.run.dir).secret
    rollout = {"bank": None, "top_p": 1.0, "top_k": -1, "min_p": 0.0}  # log-probs over the whole distribution
    config = with_settings(config, objective=ObjectiveConfig(), rollout=rollout, engine=engine)
    preflight(config, source)
    directory = numbered_directory(config.run.dir / "certify", config.model.start.absolute().name, resume=False)
    config = with_settings(config, run={"dir": directory}, weight_sync={"directory": None})
    run_dir = RunDir(directory)
    run_dir.make()
    make_secret(config)
    report(f"measuring in {directory}")
    with running_engines(config) as answering:
        report(f"the engine answers at {answering[0]}")
        arguments = ["certify-rank", str(run_dir.config), answering[0], "--prompts", str(prompts)]
        if checkpoint is not None:
            arguments += ["--checkpoint", str(checkpoint)]
        _run_ranks(config, run_dir, tuple(arguments), report)
    certificate = read_json(directory / CERTIFICATE)
    if certificate is None:
        raise CertifyError(f"{directory / CERTIFICATE}: the ranks ended without writing it; see {run_dir.logs}")
    return directory / CERTIFICATE, certificate


def _run_ranks(config: Config, run: RunDir, arguments: tuple[str, ...], report: Callable[[str], None]) -> None:
    launcher, ranks = LocalLauncher(run), list[Child]()
    deadline = time.monotonic() + LIMIT_S
    progress, shown = run.root / PROGRESS, 0
    try:
        for plan in rank_plans(config, "rank", arguments):
            ranks.append(launcher.start(plan))
        running = ranks
        while running:
            running = [rank for rank in ranks if rank.poll() is None]
            lines = progress.read_text().splitlines() if progress.exists() else []
            for line in lines[shown:]:
                report(line)
            shown = len(lines)
            for rank in ranks:
                if code := rank.poll():
                    raise CertifyError(with_last_lines(f"{rank.name} ended: {exit_reason(code)}", rank))
            if running and time.monotonic() > deadline:
                message = f"{running[0].name} did not end within {LIMIT_S:.0f} s"
                raise CertifyError(with_last_lines(message, running[0]))
            time.sleep(POLL_S)
    finally:
        launcher.end(ranks, GRACE_S)
