from collections.abc import Iterator

import pytest
import torch

from tests.support.ranks import TORCH, Ranks


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, "gloo", TORCH) as started:
        yield started
