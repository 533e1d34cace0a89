"""Real engines with an adapter sample, score and store the same as with the merged model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dppo_megatron.config import Config
from dppo_megatron.config.model import LoraConfig
from dppo_megatron.hf.lora import PEFT_PREFIX
from dppo_megatron.rollout.engines.protocol import Engine, EngineError, EngineRefused, GenerateRequest, UpdateMode
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.weights.fingerprint import differing
from tests.rollout.engines.test_contract_updates import update_while_generating
from tests.rollout.engines.test_fingerprints import fingerprint, weights_of
from tests.support.engines import PROMPT, Reference, engine_config, group, make_adapter, running_server, with_engine

pytestmark = pytest.mark.engines

TOLERANCE = 1e-5
LORA = {"r": 4, "alpha": 4.0, "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


@dataclass(frozen=True)
class Adapted:
    config: Config
    url: str

    @property
    def model(self) -> Path:
        return self.config.model.path

    def use(self, function):
        return with_engine(self.config, self.url, function)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def adapted(request, tiny_models, tmp_path_factory) -> Adapted:
    plain = engine_config(tiny_models("dense")["a"], kind=request.param, max_num_seqs=32)
    config = with_settings(plain, weight_sync={"lora": "adapter"}, model={"lora": LoraConfig(**LORA)})
    with running_server(config, tmp_path_factory.mktemp("adapters") / "server.log", version=0) as url:
        yield Adapted(config, url)


@pytest.fixture
def adapter(adapted, tmp_path_factory):
    """f(seed, changes of its adapter_config.json) -> (directory, its tensors)."""

    def make(seed: int, **changes) -> tuple[Path, dict[str, torch.Tensor]]:
        directory = tmp_path_factory.mktemp("policies") / "v1"  # under the roots of the server
        return directory, make_adapter(directory, adapted.model, adapted.config.model.lora, seed, **changes)

    return make


def merged(adapted: Adapted, tensors: dict[str, torch.Tensor]) -> Reference:
    reference = Reference(adapted.model)
    state = reference._model.state_dict()
    for name, a in tensors.items():
        if ".lora_A." in name:
            weight = state[name.removeprefix(PEFT_PREFIX).replace(".lora_A", "")]
            weight += tensors[name.replace(".lora_A.", ".lora_B.")] @ a
    return reference


def test_samples_scores_and_weights_of_an_engine_with_an_adapter_are_of_the_merged_model(adapted, adapter):
    (first, one), (second, two) = adapter(1), adapter(2)

    async def each(engine: Engine):
        await engine.load_weights(first, 1)
        samples, held = await engine.generate(group("one")), await engine.weights_fingerprint()
        await engine.load_weights(second, 2)
        scores, info = await engine.score(PROMPT), await engine.info()
        (taught,) = await engine.generate(
            GenerateRequest("self", np.array(PROMPT), 1, (0,), 1.0, 1, topk=2, scored=True)
        )
        assert set(taught.versions.tolist()) == {2}
        np.testing.assert_allclose(taught.rollout_logprob, scores, rtol=0, atol=TOLERANCE)
        return samples, held, scores, await engine.weights_fingerprint(), info.version

    samples, held_one, scores, held_two, version = adapted.use(each)
    reference = merged(adapted, one)
    for sample in samples:
        assert (sample.versions == 1).all()
        np.testing.assert_allclose(sample.rollout_logprob, reference.sampled(sample.token_ids), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(scores, merged(adapted, two).score(PROMPT), rtol=0, atol=TOLERANCE)
    assert np.abs(scores - Reference(adapted.model).score(PROMPT)).max() > 0.1
    assert version == 2
    sent_one, sent_two = (fingerprint(weights_of(adapted.model) | adapter) for adapter in (one, two))
    assert differing(sent_one, held_one) == differing(sent_two, held_two) == []
    assert len(differing(sent_one, held_two)) == 4  # layers


def test_running_requests_go_on_under_the_next_adapter(adapted, adapter):
    """Every token is drawn from exactly the adapter it is tagged with, given the whole text before it."""
    policies = {1: adapter(1), 7: adapter(2)}

    async def load(engine: Engine, name: str, version: int, mode: UpdateMode = "keep") -> None:
        version = version or 1
        await engine.load_weights(policies[version][0], version, mode)

    request = group("kept", n=2, max_tokens=200)
    rollouts = adapted.use(
        lambda engine: update_while_generating(
            engine, load, request, 7, "keep", caught=lambda r: set(r.versions) == {1, 7}
        )
    )
    for rollout in rollouts:
        for version, (_, tensors) in policies.items():
            difference = np.abs(rollout.rollout_logprob - merged(adapted, tensors).sampled(rollout.token_ids))
            assert difference[rollout.versions == version].max() < TOLERANCE
            assert difference[rollout.versions != version].max() > 0.1


def test_an_engine_is_out_after_a_load_that_failed_and_back_after_the_next(adapted, adapter):
    good, tensors = adapter(1)
    # Only the server rejects it: vLLM has a smaller rank, and SGLang's adapters have no head.
    beyond = {"vllm": {"r": 512}, "sglang": {"target_modules": [*LORA["targets"], "lm_head"]}}
    bad, _ = adapter(2, **beyond[adapted.config.engine.kind])

    async def each(engine: Engine):
        await engine.load_weights(good, 1)
        with pytest.raises(EngineRefused):  # a whole model
            await engine.load_weights(adapted.model, 2)
        await engine.score(PROMPT)
        with pytest.raises(EngineError):
            await engine.load_weights(bad, 3)
        with pytest.raises(EngineError):
            await engine.generate(group("bad"))
        await engine.load_weights(good, 4)
        return await engine.score(PROMPT), (await engine.info()).version

    scores, version = adapted.use(each)
    np.testing.assert_allclose(scores, merged(adapted, tensors).score(PROMPT), rtol=0, atol=TOLERANCE)
    assert version == 4
