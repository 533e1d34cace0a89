"""Checkpoint files that name code, point elsewhere or are damaged are rejected by name, and no code runs."""

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from dppo_megatron.hf import ModelError, read_hf_config
from dppo_megatron.hf.torch_dist_metadata import read_metadata
from dppo_megatron.hf.torch_dist_reader import TorchDistWeights
from tests.attack import cases, generator
from tests.support.crafted import RunsCode, named_when_read_again

BEFORE = Path(__file__).parents[1] / "data" / "run_before" / "run"  # written by an earlier version


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return shutil.copytree(BEFORE / "checkpoints" / "step-000002", tmp_path / "step-000002")


def test_metadata_that_runs_code_is_refused_and_does_not_run(checkpoint, tmp_path):
    metadata = checkpoint / ".metadata"
    assert len(read_metadata(checkpoint).state_dict_metadata) == 48
    for body in (RunsCode(tmp_path / "ran"), {"state": [RunsCode(tmp_path / "ran")]}):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            metadata.write_bytes(pickle.dumps(body, protocol))
            with pytest.raises(ModelError, match=r".metadata: cannot be read: .*names \w+\.system, which describes no"):
                TorchDistWeights(checkpoint, read_hf_config(BEFORE / "model"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "torch load", "torch.serialization os", "operator attrgetter"]
)
def test_metadata_admits_no_other_names(checkpoint, name):
    module, attribute = name.split()
    (checkpoint / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(ModelError, match=f"names {module}.{attribute}, which describes no tensor"):
        read_metadata(checkpoint)


def test_metadata_names_the_same_when_torch_reads_it_after_us(checkpoint, tmp_path):
    planner = "torch.distributed.checkpoint.planner"
    crafted = named_when_read_again(
        f"touch {tmp_path / 'ran'}", (planner, "SavePlan"), ("torch.serialization", "_get_layout")
    )
    (checkpoint / ".metadata").write_bytes(crafted)
    with pytest.raises(ModelError, match=r".metadata: cannot be read: .*sets fields of .*_get_layout"):
        read_metadata(checkpoint)
    a_class, an_enumeration = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        f"c{planner}\nWriteItemType\n".encode(),
    )
    fields = b"}Vmade\nK\x01s"
    for sets in (a_class + b"N" + fields + b"\x86b.", an_enumeration + b"K\x01\x85R" + fields + b"b."):
        (checkpoint / ".metadata").write_bytes(sets)
        with pytest.raises(ModelError, match=r".metadata: cannot be read: .*sets fields of "):
            read_metadata(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_metadata_that_is_replaced_after_it_was_checked_is_not_read(checkpoint, tmp_path):
    from dppo_megatron.train.actor.checkpoint.only_data import check_files, checked_metadata

    reader, digest = torch.distributed.checkpoint.FileSystemReader(checkpoint), check_files(checkpoint)
    whole = reader.read_metadata()
    with checked_metadata(digest):
        assert reader.read_metadata() == whole
    (checkpoint / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(ModelError, match=r".metadata: was changed after it was checked"), checked_metadata(digest):
        reader.read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["../weights.pt", "/etc/passwd", "", ".."])
def test_metadata_that_places_a_tensor_outside_the_checkpoint_is_refused(checkpoint, where):
    metadata = read_metadata(checkpoint)
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = _StorageInfo(where, 0, 1)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelError, match="which is no file of the checkpoint"):
        read_metadata(checkpoint)


def refused(read, path: Path) -> str | None:
    try:
        read(path)
    except ModelError as error:
        return str(error)
    return None


def test_damaged_metadata_is_an_error_that_names_it(checkpoint):
    whole = (checkpoint / ".metadata").read_bytes()
    for case in range(cases(300)):
        draw = generator("metadata", case)
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (checkpoint / ".metadata").write_bytes(damaged[: draw.choice((None, draw.randrange(len(damaged))))])
        refusal = refused(read_metadata, checkpoint)
        assert refusal is None or ".metadata: " in refusal
        assert len(refusal or "") < 2000


def test_every_file_of_a_checkpoint_is_read_as_data(checkpoint, tmp_path):
    from dppo_megatron.train.actor import CheckpointError
    from dppo_megatron.train.actor.checkpoint.only_data import check_files, load_data

    rng = checkpoint / "rng" / "pipeline-0-tensor-0.pt"
    check_files(checkpoint)
    assert set(load_data(rng)) == {"python", "numpy", "torch", "cuda", "tracker"}
    torch.save({"python": RunsCode(tmp_path / "ran")}, rng)
    with pytest.raises(CheckpointError, match=r"tensor-0.pt: cannot be read: it contains the object posix.system"):
        load_data(rng)
    torch.save([RunsCode(tmp_path / "ran")], checkpoint / "common.pt")
    with pytest.raises(CheckpointError, match=r"common.pt: cannot be read: it contains the object posix.system"):
        check_files(checkpoint)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(CheckpointError, match="does not name the format torch_dist"):
        check_files(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_an_object_among_the_shards_is_read_as_data(checkpoint, tmp_path):
    """torch loads objects with plain pickle."""
    from dppo_megatron.train.actor.checkpoint.only_data import data_only, reason

    metadata, index = read_metadata(checkpoint), MetadataIndex("object")
    torch.save(RunsCode(tmp_path / "ran"), checkpoint / "object.distcp")
    metadata.state_dict_metadata["object"] = BytesStorageMetadata()
    metadata.storage_data[index] = _StorageInfo("object.distcp", 0, (checkpoint / "object.distcp").stat().st_size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    read_metadata(checkpoint)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException) as refused, data_only():
        torch.distributed.checkpoint.load({"object": None}, checkpoint_id=checkpoint, no_dist=True)
    assert "it contains the object posix.system" in reason(refused.value)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("form", ["tensor", "file"])
def test_extra_states_may_name_only_recipes_of_transformer_engine(tmp_path, form):
    from dppo_megatron.train.actor import CheckpointError
    from dppo_megatron.train.actor.checkpoint.only_data import check_extra_states

    def raw(pickled: bytes) -> dict:
        return {"model0": {"layers.0.fc1._extra_state": torch.tensor(list(pickled), dtype=torch.uint8)}}

    def member(module: bytes, name: bytes) -> bytes:
        """getattr(module.Format, name), as some pickle members of enumerations."""
        return b"cbuiltins\ngetattr\n(" + module + b"Format\nV" + name + b"\ntR."

    def states(thing):
        if form == "file":
            file = io.BytesIO()
            torch.save(thing, file)
            return {"model0": {"layers.0.fc1._extra_state": file}}
        return raw(pickle.dumps(thing))

    check_extra_states({"model0": {"layers.0.fc1._extra_state": torch.empty(0), "weight": torch.ones(3)}}, tmp_path)
    check_extra_states(states({"extra_fp8_variables": {"num_gemms": 1}}), tmp_path)
    recipe = b"ctransformer_engine.common.recipe\n"
    for pickled in (recipe + b"Float8CurrentScaling\n)R}(Vmargin\nK\x00ub.", member(recipe, b"HYBRID")):
        check_extra_states(raw(pickled), tmp_path)
    for pickled in (
        member(recipe, b"__init__"),
        member(b"cos\n", b"system"),
        recipe + b"os\n.",
        recipe + b"Format.x\n.",
    ):
        with pytest.raises(CheckpointError, match=r"fc1._extra_state cannot be read: it contains the object "):
            check_extra_states(raw(pickled), tmp_path)
    with pytest.raises(CheckpointError, match=r"fc1._extra_state cannot be read: it contains the object posix.system"):
        check_extra_states(states({"recipe": RunsCode(tmp_path / "ran")}), tmp_path)
    assert not (tmp_path / "ran").exists()
