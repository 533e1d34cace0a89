"""Real SGLang servers of a dense model in bf16: one freezes in each phase of a publish."""

import pytest

from tests.support.engines import engine_config, make_model
from tests.train.weight_sync.test_real_engines import check_scores, needs_sglang, publish_frozen, started_together
from tests.train.weight_sync.trainer_process import WAIT

pytestmark = pytest.mark.engines
TIMEOUT_S = 6.0
TOLERANCE = 0.1  # of bf16; the log-probs of the two policies differ by several nats


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang") / "models"
    return make_model(root / "a", seed=1), make_model(root / "b", seed=2)


@pytest.fixture(scope="module")
def two_servers(policies, tmp_path_factory):
    config = engine_config(policies[0], kind="sglang", dtype="bf16")
    config = config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"timeout_s": TIMEOUT_S})})
    needs_sglang(config)
    yield from started_together(config, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize(
    ("transport", "routes"),
    [
        ({"transport": "shared_storage"}, ("/update_weights_from_disk", "/generate", "/weights_checker")),
        (
            {"transport": "broadcast", "bucket_bytes": 20_000},
            ("/init_weights_update_group", "/update_weights_from_distributed"),
        ),
    ],
    ids=["shared_storage", "broadcast"],
)
def test_an_engine_frozen_in_any_phase_is_left_out(two_servers, policies, transport, routes):
    """The same as for vLLM in test_real_engines: the other one continues, and the next publish has both again."""
    a, b = policies
    directory = a.parent.parent / f"frozen-{transport['transport']}"  # engines read only where their models are
    sequence = [b, WAIT, a, WAIT, b][: 2 * len(routes) - 1]
    settings = {"engine": {"kind": "sglang"}, "dtype": "bf16", "timeout_s": TIMEOUT_S, **transport}
    records = publish_frozen(two_servers, directory, a, routes, sequence, **settings)
    check_scores(records, (b, a, b)[: len(routes)], two_servers[:1], TOLERANCE)
