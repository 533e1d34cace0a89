"""Which requests may read the prefix cache: not those whose experts our own recorder has to see computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.engine.protocol import EngineClient

from dppo_megatron.engines.vllm.extension.experts import ExpertsReader
from dppo_megatron.engines.vllm.extension.generation import _params
from tests.support.engines import group


def reader(*, native: bool) -> ExpertsReader:
    config = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=native),
        model_config=SimpleNamespace(is_moe=True, get_num_experts_per_tok=lambda: 2),
        device_config=SimpleNamespace(device_type="cuda" if native else "cpu"),
        use_v2_model_runner=False,
    )
    return ExpertsReader(EngineClient, config)


@pytest.mark.parametrize(
    ("native", "experts", "skipped"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_only_recorded_experts_need_every_position_computed(native, experts, skipped):
    kept = SimpleNamespace(native=False)
    params = _params(group("g", experts=experts), 1, reader(native=native), kept)
    assert bool(params.skip_reading_prefix_cache) == skipped
