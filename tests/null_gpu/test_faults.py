"""The purpose of the null device: each planted fault fails its case with an error that names it."""

import pytest

from tests.null_gpu import faults
from tests.null_gpu.test_vllm_config import examine
from tests.support.ranks import RankError


@pytest.mark.smoke
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_of_the_actor_shows(on_ranks, models, tmp_path, name):
    fault = faults.FAULTS[name]
    with pytest.raises(RankError) as raised:
        on_ranks(fault.case.ranks).run(faults.run, fault=name, models=models, directory=tmp_path)
    assert fault.shows in str(raised.value)


def test_a_renamed_private_name_of_vllm_shows(tmp_path):
    renamed = "from vllm.v1.worker.gpu_worker import Worker; Worker.begin_weight_update = Worker.start_weight_update; "
    renamed += "del Worker.start_weight_update"
    found = examine(tmp_path, [], f"from tests.null_gpu.vllm_config import _be_an_h100; _be_an_h100()\n{renamed}")
    assert found["absent"] == ["vllm.v1.worker.gpu_worker:Worker.start_weight_update"]
