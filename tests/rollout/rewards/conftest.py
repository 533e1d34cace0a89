import numpy as np
import pytest

from dppo_megatron.types import Prompt


@pytest.fixture
def prompt():
    def make(answer: str, **columns) -> Prompt:
        return Prompt(0, 0, np.zeros(1, np.int32), "", answer, columns)

    return make
