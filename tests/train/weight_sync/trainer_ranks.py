"""Trainer ranks over gloo with a tiny model, and fake engines in the thread of rank 0."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dppo_megatron import hf
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.rollout.fleet.registry import Service
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.weight_sync import build_publisher
from dppo_megatron.train.weight_sync.engine_thread import EngineThread
from dppo_megatron.train.weight_sync.publisher import PublishResult
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.actor_ranks import Rank
from tests.support.configs import make_config
from tests.support.fakes.engine import SCORES, FakeEngine
from tests.support.models import build_gpt
from tests.support.ranks import megatron_group

TIMEOUT_S = 2.0
TOKENS = np.arange(len(SCORES) + 1, dtype=np.int32)  # of the weight check


@dataclass
class Trainer:
    """The parts of a scenario on one rank; only rank 0 has `engines`."""

    rank: Rank
    publisher: Any = None
    actor: Any = None
    engines: list[FakeEngine] = field(default_factory=list)

    def load(self, policy: str) -> None:
        hf.load_into(self.actor.model_chunks, self.rank.models / f"{self.actor.family}-{policy}")

    def publish(self, policy: str, version: int) -> PublishResult:
        self.load(policy)
        return self.publisher.publish(version)

    def move(self, share: float, seed: int) -> None:
        """Change about `share` of the weights, in bf16 too; all ranks that have a weight change it equally."""
        generator = torch.Generator().manual_seed(seed)
        for chunk in self.actor.model_chunks:
            for parameter in chunk.parameters():
                draw = torch.rand(parameter.shape, generator=generator)
                parameter.data.mul_(1 + (draw < share) * 2.0**-6).add_((draw < share) * 2.0**-20)

    def assert_held(self, policy: str, *, first: int | None = None) -> None:
        """On rank 0: the engines, or the `first` of them, have exactly the weights of the policy's directory."""
        source = hf.SafetensorsDirectory(self.rank.models / f"{self.actor.family}-{policy}")
        for engine in self.engines[:first]:
            assert engine.weights.keys() == set(source.tensors), engine.url
            for name, tensor in engine.weights.items():
                assert torch.equal(tensor, source.tensor(name)), (engine.url, name)

    def confirmed(self) -> set[str]:
        """Return the URLs of the engines that the published policy names."""
        return set(PublishedPolicy.read(RunDir(self.rank.directory).published).confirmed)

    def unlike_fp8(self, policy: str) -> list[str]:
        """Return the names of the engine's tensors that differ in a bit from the policy's bf16 weights in FP8.

        An engine that emulates FP8 has the values of that export in bf16.
        """
        source = hf.SafetensorsDirectory(self.rank.models / f"{self.actor.family}-{policy}")
        plain = ((name, source.tensor(name).bfloat16()) for name in source.tensors)
        expected, held = dict(hf.fp8.quantize_projections(plain)), self.engines[0].weights
        if self.publisher._config.engine.quantization == "fp8_block_emulated":
            scales = {name: expected.pop(f"{name}_scale_inv") for name in list(expected) if hf.fp8.is_quantized(name)}
            expected |= {name: hf.fp8.dequantize(expected[name], scale) for name, scale in scales.items()}

        def same(name: str) -> bool:
            if name not in expected or name not in held or held[name].dtype != expected[name].dtype:
                return False
            return torch.equal(held[name].view(torch.uint8), expected[name].view(torch.uint8))

        return sorted(name for name in expected.keys() | held.keys() if not same(name))


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """Message of the error that `call` raises."""
    try:
        call(*arguments)
    except ExpectedError as error:
        return str(error)
    return "nothing raised"


@contextmanager
def trainer(rank: Rank, family: str, *, tp=1, pp=1, ep=1, engines=1, engine=(), **weight_sync):
    with megatron_group(rank.directory, tp, pp, ep=ep):
        model = rank.models / f"{family}-a"
        config = make_config(
            run={"dir": str(rank.directory)},
            model={"path": str(model)},
            engine={"dtype": "fp32", "unavailable_timeout_s": TIMEOUT_S} | dict(engine),
            weight_sync={"transport": "broadcast", "bucket_bytes": 6000, "timeout_s": TIMEOUT_S, **weight_sync},
        )
        hf_config = hf.read_hf_config(model)
        actor = SimpleNamespace(
            model_chunks=build_gpt(hf_config, tp, pp, None, ep),
            hf=hf_config,
            family=family,
            layout=SimpleNamespace(device=torch.device("cpu")),
            score=lambda tokens: SCORES,
        )
        t = Trainer(rank, actor=actor)
        thread = None
        if rank.rank == 0:
            t.engines = [FakeEngine(f"http://127.0.0.1:{90 + i}") for i in range(engines)]
            by_url = {engine.url: engine for engine in t.engines}
            book = {f"engine-{i}": Service(f"engine-{i}", url, 0, "") for i, url in enumerate(by_url)}
            thread = EngineThread(LiveEngines(config, lambda: book, lambda _, url: by_url[url]))
        t.publisher = build_publisher(config, actor, thread, None if thread is None else TOKENS)
        try:
            yield t
        finally:
            t.publisher.close()
