"""Build an orchestrator from the config and run it until the run ends: `dppo-megatron orchestrator`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dppo_megatron.bank import BankWriter, EarlierSamples
from dppo_megatron.bank.journal import Journals
from dppo_megatron.common.process import raise_open_files_limit
from dppo_megatron.config import Config, ConfigError
from dppo_megatron.data.prompts import PromptSource, training_prompts
from dppo_megatron.data.tokenizer import end_token_ids, load_tokenizer
from dppo_megatron.hf import read_hf_config
from dppo_megatron.report.logs import setup_logging
from dppo_megatron.report.run_state import heartbeats
from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, EngineTimeout, EngineUnavailable
from dppo_megatron.rollout.engines.serving import start_model
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.fleet.pool import EnginePool, FixedEngines
from dppo_megatron.rollout.fleet.registry import engine_services, engine_urls
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.gateway import Gateway
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedFollower, PublishedPolicy

from .evaluation import Evaluated, Evaluator
from .metrics import StepRecorder
from .orchestrator import Orchestrator
from .teachers import MAX_REQUESTS, Teachers

log = logging.getLogger(__name__)

LAUNCHER_S = 60.0  # the launcher can name a rank that hangs; the orchestrator cannot, so it waits this much longer
OTHER_FILES = 256  # bank, logs, reward processes, health checks


def run_orchestrator(config: Config, prompts: int | None = None) -> None:
    """Wait for the engines, check that they can serve this config, and sample until the bank is full.

    `prompts` is the number of groups that the start model samples without a trainer. With None the orchestrator samples
    as many as the trainer needs.
    """
    run = RunDir(config.run.dir)
    setup_logging("orchestrator", run.root)
    allow_open_files(config)
    setting = _Setting(config)  # this and the prompts are loaded while the engines start
    if config.environment.source is None:
        setting.training_prompts(None)
    engine_urls(config, run)
    for server_config in (teacher_config(config, name) for name in config.started_teachers):
        engine_urls(server_config, RunDir(server_config.run.dir))

    async def main() -> None:
        task = asyncio.create_task(_fill_bank(config, setting, prompts))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        log.info("stopped by a signal; every finished group is in the bank")


def allow_open_files(config: Config) -> None:
    """Raise the soft limit for open files in this process, because every engine request is a connection.

    Raises `ConfigError` if sampling may need more than the hard limit.
    """
    rollout = config.rollout
    # An update may interrupt all samples, and each then needs a second request. Evaluations run concurrently.
    needed = rollout.max_concurrent_groups * (rollout.group_size + 1) + OTHER_FILES
    needed += len(config.distillation.teachers) * MAX_REQUESTS
    if config.environment.source is not None:
        needed += config.environment.workers + 2 * rollout.max_concurrent_groups  # the journals
    limit = raise_open_files_limit(needed)
    if needed > limit:
        raise ConfigError(
            f"limit of open files {limit} (ulimit -Hn)",
            [
                f"rollout.max_concurrent_groups = {rollout.max_concurrent_groups} with rollout.group_size = "
                f"{rollout.group_size}: may need {needed} connections and files; raise the limit or lower one of them"
            ],
        )


async def evaluate_once(
    config: Config, engines: Sequence[Engine], policy: object, version: int = 0
) -> dict[str, dict[str, float]]:
    """Evaluate the policy that the engines serve now on every set; return the metrics by set.

    `version` and `policy` identify the policy. Records go to the run's rollout metrics.
    """
    setting = _Setting(config)
    RunDir(config.run.dir).rollout_metrics.unlink(missing_ok=True)  # `Evaluator` reports finished sets again
    sampler = Sampler(FixedEngines(engines))
    async with contextlib.AsyncExitStack() as pools:
        episodes = await setting.episodes(pools, sampler)
        return await setting.evaluator(pools, episodes).start(version, policy, sampler)


async def _fill_bank(config: Config, setting: _Setting, prompts: int | None) -> None:
    run = RunDir(config.run.dir)
    if prompts is not None:  # there is no trainer; every engine loads this policy
        run.weights.mkdir(exist_ok=True)
        PublishedPolicy(0, str(start_model(config).absolute()), time.time()).write(run.published)
    groups = config.rollout.prompts_per_step
    published = PublishedFollower(
        run.published, config.run.stall_timeout_s + LAUNCHER_S, lambda: [beat.since for beat in heartbeats(run)]
    )

    async def check(engine: Engine) -> None:
        await engine.check_compatible(config, vocab_size=setting.vocab_size)

    await _check_all(config, check)
    budget = ByteBudget()
    pool = EnginePool(
        config,
        services=lambda: engine_services(config, run),
        published=published,
        build=lambda config, url: build_engine(config, url, budget),
        check=check,
        trainer=prompts is None,
    )
    sampler = Sampler(pool)
    async with contextlib.AsyncExitStack() as pools:
        bank = pools.enter_context(BankWriter(run.bank, groups))
        rewards = pools.enter_context(RewardPool(config.reward))
        journals = None
        if config.environment.source is not None:
            journals = Journals(run.open_turns, bank.done_positions())
            pools.callback(journals.close)
        episodes = await setting.episodes(pools, sampler, journals)
        take_episode_metrics = dict if episodes is None else episodes.take_metrics
        teachers = None
        if config.servers_teach:
            teachers = Teachers(config, setting.tokenizer, setting.vocab_size, sampler)
            pools.push_async_callback(teachers.close)
        async with pool:
            await Orchestrator(
                config,
                sampler=sampler,
                prompts=setting.training_prompts(episodes),
                tokenizer=setting.tokenizer,
                rewards=rewards,
                bank=bank,
                published=published,
                evaluator=setting.evaluator(pools, episodes, rewards) if config.eval_sets else None,
                recorder=StepRecorder(
                    run.rollout_metrics if prompts is None else run.metrics,
                    groups,
                    lambda: {
                        **sampler.take_metrics(),
                        **rewards.take_metrics(),
                        **take_episode_metrics(),
                        **(teachers.take_metrics() if teachers else {}),
                    },
                    alone=prompts is not None,
                ),
                stop_token_ids=setting.stop_token_ids,
                episodes=episodes,
                teachers=teachers,
                journals=journals,
                prompts_in_all=prompts,
                budget=budget,
                earlier=EarlierSamples(bank.reader()) if config.engine.draft_tokens else None,
            ).run()


async def _check_all(config: Config, check: Callable[[Engine], Awaitable[None]]) -> None:
    """Check all engines. An unsuitable setting ends the run. An engine that is down is checked when it returns."""
    for service in engine_services(config, RunDir(config.run.dir)).values():
        engine = build_engine(config, service.url)
        try:
            await check(engine)
        except (EngineUnavailable, EngineTimeout) as error:
            log.warning("%s did not answer at the start: %s", service.name, error)
        finally:
            await engine.close()


class _Setting:
    """Provides the common parts for sampling and evaluation: tokenizer, end tokens and prompts."""

    def __init__(self, config: Config):
        self._config = config
        self._hf = read_hf_config(config.model.path)
        self.vocab_size = self._hf.vocab_size
        self.tokenizer = load_tokenizer(config.model.path, self.vocab_size)
        end = end_token_ids(config.model.path, self.tokenizer)
        self.stop_token_ids = tuple(dict.fromkeys((*end, *config.rollout.stop_token_ids)))
        self._prompts: PromptSource | None = None

    def training_prompts(self, episodes: Episodes | None) -> PromptSource:
        """Return the training prompts, rendered with the tools of `episodes`. The first call reads them."""
        if self._prompts is None:
            self._prompts = training_prompts(self._config, self.tokenizer, _tools(episodes))
        return self._prompts

    async def episodes(
        self, pools: contextlib.AsyncExitStack, sampler: Sampler, journals: Journals | None = None
    ) -> Episodes | None:
        """Return `Episodes` for the configured environment, valid until `pools` closes; None without environment."""
        config = self._config
        if config.environment.source is None:
            return None
        environments = pools.enter_context(EnvironmentPool(config.environment))
        gateway, tools = None, []
        if config.environment.agent is None:
            tools = await environments.tools()
        else:
            gateway = await pools.enter_async_context(Gateway(config.environment.host))
        experts = self._hf.moe if config.rollout.routing_replay else None
        return Episodes(
            config,
            sample=sampler.sample,
            environments=environments,
            tokenizer=self.tokenizer,
            tools=tools,
            stop_token_ids=self.stop_token_ids,
            routing=None if experts is None else (sum(experts.layers), experts.top_k),
            journals=journals,
            gateway=gateway,
        )

    def evaluator(
        self, pools: contextlib.AsyncExitStack, episodes: Episodes | None, rewards: RewardPool | None = None
    ) -> Evaluator:
        """Return the evaluator. Sets without a grader use the run's `rewards`. `pools` closes the other graders."""
        config, run = self._config, RunDir(self._config.run.dir)
        sets = {}
        for name, settings in config.eval_sets.items():
            graders = rewards
            if graders is None or settings.reward != config.reward:
                graders = pools.enter_context(RewardPool(settings.reward or config.reward))
            sets[name] = Evaluated(
                settings,
                PromptSource(
                    settings.path, self.tokenizer, config.data_of(settings), config.run.seed, tools=_tools(episodes)
                ).once(),
                graders,
                episodes,
            )
        return Evaluator(
            config,
            sets=sets,
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_token_ids,
            output=run.rollout_metrics,
            answers=run.answers,
        )


def _tools(episodes: Episodes | None) -> Sequence[dict[str, Any]]:
    return [] if episodes is None else episodes.tools
