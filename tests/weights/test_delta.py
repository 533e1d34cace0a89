"""Deltas restore any bits of a version, and damaged deltas are rejected."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dppo_megatron.weights import delta


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def stored(directory: Path, base: Path, version: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    before, tensors = delta.Version(base), {}
    for name, tensor in version.items():
        if (found := delta.change(before.tensor(name), tensor)) is not None:
            tensors |= found.stored(name)
    if tensors:
        save_file(tensors, directory / "part.safetensors")
    delta.write_base(directory, base.name)
    return directory


@pytest.fixture
def model(tmp_path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        "embedding": torch.randn(3, 50_001).bfloat16(),  # further apart than a gap reaches; no multiple of 8 bytes
        "norm": torch.randn(7),
        "fp8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "scale": torch.randn(()),
        "kept": torch.randn(5).half(),
    }
    (tmp_path / "v0").mkdir()
    save_file(tensors, tmp_path / "v0" / "model.safetensors")
    return tensors


def moved(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Other bits in about `share` of the elements of all but "kept"."""
    generator = torch.Generator().manual_seed(seed)
    out = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in out.items():
        if name != "kept":
            raw = tensor.view(-1).view(torch.uint8).view(tensor.numel(), -1)
            raw[torch.rand(len(raw), generator=generator) < share, 0] ^= 1
    return out


@pytest.mark.parametrize("clustered", [False, True], ids=["random", "clustered"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_bytes_are_at_most_a_fifth_more_than_values_and_indices(tmp_path, share, clustered):
    """The bound is for the files with headers and checksums. An index has 2 bytes, enough for the gap between two
    changes in a tensor of a layer."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up", "down")]
    old = {name: torch.randn(512, 1536, generator=generator).bfloat16() for name in names}
    new, changed = {}, 0
    for name, tensor in old.items():
        new[name] = tensor.clone()
        if clustered:  # rows, as of an embedding or of an expert's part
            which = torch.zeros(512, 1536, dtype=torch.bool)
            which[: max(1, round(512 * share))] = True
        else:
            which = torch.rand(512, 1536, generator=generator) < share
        new[name].view(torch.int16)[which] ^= 1
        changed += int(which.sum())
    (tmp_path / "v0").mkdir()
    save_file(old, tmp_path / "v0" / "model.safetensors")
    stored(tmp_path / "v1", tmp_path / "v0", new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in delta.Version(tmp_path / "v1").tensors())
    nbytes = sum(file.stat().st_size for file in (tmp_path / "v1").iterdir())
    assert nbytes <= 1.2 * changed * (2 + 2)


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.4])
def test_a_chain_reads_as_the_bits_of_its_last_version(tmp_path, model, share):
    versions = [model]
    for number in range(1, 5):
        versions.append(moved(versions[-1], share if number != 3 else 1.0, number))
        stored(tmp_path / f"v{number}", tmp_path / f"v{number - 1}", versions[-1])
    for number, expected in enumerate(versions):
        read = dict(delta.Version(tmp_path / f"v{number}").tensors())
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].shape == tensor.shape
            assert torch.equal(bits(read[name]), bits(tensor)), (number, name)
    assert delta.chain(tmp_path / "v4") == (tmp_path / "v0", [tmp_path / f"v{n}" for n in range(1, 5)])


def test_bits_count_and_not_values():
    old, new = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0])
    assert delta.change(old, new).changed == 1
    assert delta.change(old, old.clone()) is None
    old = torch.zeros(400_000).bfloat16()
    assert set(delta.change(old, old + 1).stored("w")) == {"w", "w:checks"}, "all of it: as a whole"


@pytest.mark.parametrize(
    "place", [0, delta.FAR - 1, delta.FAR, delta.FAR + 1, 2 * delta.FAR, 3 * delta.FAR + 1, 149_999]
)
def test_entries_far_apart_are_reached(place):
    old = torch.zeros(150_000, dtype=torch.int16)
    new = old.clone()
    new[place] = 5
    new[-1] = 7
    found = delta.change(old, new)
    gaps = found.stored("w")["w:gaps"]
    assert int(gaps.min()) >= 0
    assert torch.equal(gaps.long().cumsum(0), found.positions)
    assert torch.equal(found.new, new[found.positions])
    assert {place, 149_999} <= set(found.positions.tolist())


def test_the_checksum_sees_a_single_bit_and_places():
    for numel in (1, 3, 4, 1001):
        tensor = torch.randn(numel).bfloat16()
        for place in range(0, numel, 97):
            other = tensor.clone()
            other.view(torch.int16)[place] ^= 1
            assert delta.checksum(other) != delta.checksum(tensor)
    assert delta.checksum(torch.arange(9, dtype=torch.int16)[1:]) == delta.checksum(
        torch.arange(1, 9, dtype=torch.int16)
    )
    tensor = torch.randn(1 << 18).bfloat16()
    blocks, spans = (
        tensor.view(-1, size)[[1, 0, *range(2, len(tensor) // size)]].reshape(-1) for size in (512, 1 << 17)
    )
    up_and_down, signs = tensor.clone(), tensor.clone()
    up_and_down.view(torch.int16)[0] += 1
    up_and_down.view(torch.int16)[4] -= 1  # the next word
    signs[3], signs[100_003] = -signs[3], -signs[100_003]  # the uppermost bit of two words
    assert delta.checksum(tensor) not in map(delta.checksum, (blocks, spans, up_and_down, signs, tensor.roll(4)))
    half = slice(0, 100_000)
    assert {type(delta.checksum(t)) for t in (tensor, tensor[half], tensor[:0])} == {int}
    assert -(2**63) <= delta.checksum(tensor) < 2**63


def shortened(file: str, *names: str):
    def act(root: Path) -> None:
        tensors = load_file(root / file)
        save_file(tensors | {name: tensors[name][:-1].clone() for name in names}, root / file)

    return act


def of_another_shape(root: Path) -> None:
    tensors = load_file(root / "v1/part.safetensors")
    tensors["norm"] = torch.zeros(8)
    tensors["norm:checks"] = torch.tensor([0, delta.checksum(tensors["norm"])])
    save_file(tensors, root / "v1/part.safetensors")
    (root / "v2/part.safetensors").unlink()


def another_between(root: Path) -> None:
    """The last version has the whole tensor, so its last checksum is right."""
    for version, sums in (("v1", (0, 1.0)), ("v2", (2.0, 3.0))):
        tensors = load_file(root / version / "part.safetensors")
        tensors["norm"] = torch.full((7,), sums[1])
        tensors["norm:checks"] = torch.tensor([delta.checksum(torch.full((7,), s)) for s in sums])
        save_file(tensors, root / version / "part.safetensors")


def times_two(file: str, name: str):
    def act(root: Path) -> None:
        tensors = load_file(root / file)
        tensors[name] = tensors[name] * 2 + 1
        save_file(tensors, root / file)

    return act


def written(file: str, content: bytes):
    return lambda root: (root / file).write_bytes(content)


def cut(file: str):
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:-5])


def gone(file: str):
    return lambda root: (root / file).unlink()


def test_a_delta_that_was_written_again_as_a_whole_is_another_version(tmp_path, model):
    directory = stored(tmp_path / "v1", tmp_path / "v0", {**model, "norm": model["norm"] + 1})
    version = delta.Version(directory)
    assert version.changed == {"norm"}
    assert version.is_in(directory)
    assert not version.is_in(tmp_path / "v0")
    shutil.rmtree(directory)
    assert not version.is_in(directory)
    shutil.copytree(tmp_path / "v0", directory)
    assert not version.is_in(directory)
    assert delta.Version(directory).is_in(directory)


DAMAGE = {
    "another base": times_two("v0/model.safetensors", "embedding"),
    "a version between is another": times_two("v1/part.safetensors", "embedding:values"),
    "a version between is another, the last one whole": another_between,
    "gaps": times_two("v2/part.safetensors", "embedding:gaps"),
    "values": times_two("v2/part.safetensors", "embedding:values"),
    "checksums": times_two("v2/part.safetensors", "embedding:checks"),
    "a value short": shortened("v2/part.safetensors", "embedding:values"),
    "an entry short": shortened("v2/part.safetensors", "embedding:gaps", "embedding:values"),
    "a checksum short": shortened("v1/part.safetensors", "embedding:checks"),
    "another shape": of_another_shape,
    "an unknown tensor": lambda root: save_file({"new": torch.ones(1)}, root / "v2/more.safetensors"),
    "half a file": cut("v2/part.safetensors"),
    "no file": gone("v1/part.safetensors"),
    "no base": gone("v0/model.safetensors"),
    "a base elsewhere": written("v2/delta.json", json.dumps({"base": "../v0"}).encode()),
    "a circle": written("v0/delta.json", json.dumps({"base": "v2"}).encode()),
    "no json": written("v2/delta.json", b"{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(tmp_path, model, damage):
    one = moved(model, 0.01, 1)
    stored(tmp_path / "v1", tmp_path / "v0", one)
    stored(tmp_path / "v2", tmp_path / "v1", moved(one, 0.01, 2))
    DAMAGE[damage](tmp_path)
    with pytest.raises(delta.DamagedDelta):
        for _ in delta.Version(tmp_path / "v2").tensors():
            pass


PREFETCHED = [
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(8)),
    "model.norm.weight",
]
CHANGED = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]


@pytest.fixture
def directories(tmp_path) -> list[Path]:
    """A model, a delta that changes all of it, and one that changes `CHANGED`."""
    torch.manual_seed(0)
    model = {name: torch.randn(50, 20).bfloat16() for name in PREFETCHED}
    (tmp_path / "v0").mkdir()
    save_file(model, tmp_path / "v0" / "model.safetensors")
    every = {name: tensor.clone() for name, tensor in model.items()}
    for tensor in every.values():
        tensor[3, 4] += 1
    some = {name: tensor + 1 if name in CHANGED else tensor for name, tensor in every.items()}
    stored(tmp_path / "v1", tmp_path / "v0", every)
    stored(tmp_path / "v2", tmp_path / "v1", some)
    return [tmp_path / f"v{number}" for number in range(3)]


def waited(prefetched: delta.PrefetchedVersion) -> delta.PrefetchedVersion:
    deadline = time.monotonic() + 10
    while not prefetched.finished():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return prefetched


def same(prefetched: delta.PrefetchedVersion, directory: Path) -> bool:
    expected = dict(delta.Version(directory).tensors())
    read = dict(prefetched.tensors())
    return list(read) == list(expected) and all(torch.equal(tensor, read[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("budget", [0, 1, 5000, 1 << 30])
def test_no_more_is_kept_than_the_budget_and_one_tensor(directories, budget):
    prefetched = waited(delta.PrefetchedVersion(delta.Version(directories[2]), budget))
    kept = sum(tensor.nbytes for tensor in prefetched._tensors.values())
    assert min(budget, 2000 * len(PREFETCHED)) <= kept < budget + 2000
    assert same(prefetched, directories[2])
    assert not prefetched._tensors, "let go as it is taken"
    assert same(prefetched, directories[2]), "again, as by a server that tries twice"


def test_tensors_that_the_model_has_are_not_kept(directories, tmp_path):
    model = dict(delta.Version(directories[0]).tensors())
    stored(tmp_path / "v3", directories[0], {name: tensor + (name in CHANGED) for name, tensor in model.items()})
    prefetched = waited(delta.PrefetchedVersion(delta.Version(tmp_path / "v3"), 1 << 30))
    assert sorted(prefetched._tensors) == sorted(CHANGED), "the others are mapped files"
    assert same(prefetched, tmp_path / "v3")


def test_damage_is_found_before_the_pause(directories):
    times_two("v2/part.safetensors", "model.norm.weight")(directories[2].parent)
    prefetched = delta.PrefetchedVersion(delta.Version(directories[2]), 1 << 30)
    for look in (lambda: waited(prefetched), lambda: next(prefetched.tensors())):
        with pytest.raises(delta.DamagedDelta):
            look()


def test_a_dropped_one_keeps_nothing(directories):
    prefetched = delta.PrefetchedVersion(delta.Version(directories[2]), 1 << 30)
    prefetched.drop()
    assert not prefetched._tensors
