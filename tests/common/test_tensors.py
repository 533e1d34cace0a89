import numpy as np
from safetensors.numpy import load

from dppo_megatron.common.tensors import packed


def test_a_strided_array_is_read_back_as_it_was():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = load(packed({"turned": array.T, "column": array[:, 1]}))
    np.testing.assert_array_equal(found["turned"], array.T)
    np.testing.assert_array_equal(found["column"], array[:, 1])
