"""`dppo-megatron orchestrator`: builds one orchestrator from the config and runs it to the end of the run."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

from dppo_megatron.bank import BankWriter
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptSource, training_prompts
from dppo_megatron.data.tokenizer import end_token_ids, load_tokenizer
from dppo_megatron.engines.kinds import build_engine
from dppo_megatron.engines.protocol import Engine, EngineTimeout, EngineUnavailable
from dppo_megatron.fleet.pool import EnginePool, FixedEngines
from dppo_megatron.fleet.registry import engine_services, engine_urls
from dppo_megatron.fleet.sampling import Sampler
from dppo_megatron.hf import read_hf_config
from dppo_megatron.observability.logs import setup_logging
from dppo_megatron.rewards import RewardPool
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedFollower

from .evaluation import Evaluator
from .metrics import StepRecorder
from .open_files import allow_open_files
from .orchestrator import Orchestrator

log = logging.getLogger(__name__)


def run_orchestrator(config: Config) -> None:
    """Waits for the engines, checks that they can serve this config, and samples until the bank is full."""
    run = RunDir(config.run.dir)
    setup_logging("orchestrator", run.root)
    allow_open_files(config)
    engine_urls(config, run)

    async def main() -> None:
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await _fill_bank(config)

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        log.info("stopped by a signal; the bank holds every finished group")


async def evaluate_once(config: Config, engines: Sequence[Engine]) -> float:
    """Greedy accuracy of what the engines serve now; the record goes to the run's rollout metrics."""
    setting = _Setting(config)
    with RewardPool(config.reward) as rewards:
        return await setting.evaluator(rewards).start(0, Sampler(FixedEngines(engines)))


async def _fill_bank(config: Config) -> None:
    run, setting = RunDir(config.run.dir), _Setting(config)
    groups = config.rollout.prompts_per_step
    published = PublishedFollower(run.published, config.run.stall_timeout_s)

    async def check(engine: Engine) -> None:
        await engine.check_compatible(config, vocab_size=setting.vocab_size)

    await _check_all(config, check)
    pool = EnginePool(
        config, services=lambda: engine_services(config, run), published=published, build=build_engine, check=check
    )
    sampler = Sampler(pool)
    with BankWriter(run.bank, groups) as bank, RewardPool(config.reward) as rewards:
        async with pool:
            await Orchestrator(
                config,
                sampler=sampler,
                prompts=training_prompts(config, setting.tokenizer),
                tokenizer=setting.tokenizer,
                rewards=rewards,
                bank=bank,
                published=published,
                evaluator=None if config.data.eval is None else setting.evaluator(rewards),
                recorder=StepRecorder(
                    run.rollout_metrics, groups, lambda: {**sampler.take_metrics(), **rewards.take_metrics()}
                ),
                stop_token_ids=setting.stop_token_ids,
            ).run()


async def _check_all(config: Config, check: Callable[[Engine], Awaitable[None]]) -> None:
    """Settings that do not suit the run end it here; an engine that is down is checked when it comes back."""
    for service in engine_services(config, RunDir(config.run.dir)).values():
        engine = build_engine(config, service.url)
        try:
            await check(engine)
        except (EngineUnavailable, EngineTimeout) as error:
            log.warning("%s did not answer at the start: %s", service.name, error)
        finally:
            await engine.close()


class _Setting:
    """What sampling and evaluation share: the tokenizer, where a response ends, and prompts."""

    def __init__(self, config: Config):
        self._config = config
        self.vocab_size = read_hf_config(config.model.path).vocab_size
        self.tokenizer = load_tokenizer(config.model.path, self.vocab_size)
        end = end_token_ids(config.model.path, self.tokenizer)
        self.stop_token_ids = tuple(dict.fromkeys((*end, *config.rollout.stop_token_ids)))

    def evaluator(self, rewards: RewardPool) -> Evaluator:
        return Evaluator(
            self._config,
            prompts=PromptSource(self._config.data.eval, self.tokenizer, self._config.data, self._config.run.seed),
            tokenizer=self.tokenizer,
            rewards=rewards,
            stop_token_ids=self.stop_token_ids,
            output=RunDir(self._config.run.dir).rollout_metrics,
        )
