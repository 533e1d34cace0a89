"""Real engines in bf16 that keep something of the version before an update at lr 1e-6: one publish shows it."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.fleet.pool import EnginePool, NoEngineServes
from dppo_megatron.rollout.fleet.registry import Service
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.fingerprint import differing, group_of, in_order
from dppo_megatron.weights.published import PublishedFollower
from tests.rollout.engines.test_fingerprints import fingerprint, weights_of
from tests.support.engines import EXPERTS, engine_config, group, make_model, running_server, with_engine
from tests.support.faults import Proxy
from tests.train.weight_sync.test_real_engines import OUT, publish
from tests.train.weight_sync.trainer_process import UPDATE

pytestmark = pytest.mark.engines

NOTHING = "nothing is loaded"  # and the answer is that of a success
EVERYTHING = "everything is kept"
KEPT: dict[str, Callable[[str], bool]] = {
    EVERYTHING: lambda name: True,
    "layer 0": lambda name: ".layers.0." in name and ".experts." not in name,
    "layer 1 expert 5": lambda name: ".layers.1." in name and ".experts.5." in name,
    "lm_head": lambda name: name == "lm_head.weight",
}
LOAD = {  # route, key of the directory in its body, and the rest of the body
    "vllm": ("/dppo/load_weights", "path", {"mode": "keep", "wait_s": 60}),
    "sglang": ("/update_weights_from_disk", "model_path", {"flush_cache": True}),
}
VERSION = {  # by routes, where the body has the version
    "/dppo/load_weights": "version",
    "/dppo/receive_weights": "version",
    "/update_weights_from_disk": "weight_version",
    "/update_weight_version": "new_version",  # ends a broadcast
}


class KeepsOld:
    """A proxy hook: at the versions in `faults` the engine keeps old weights, and reports the new version."""

    def __init__(self, kind: str, model: Path, out: Path, faults: dict[int, str]):
        self._load, self._path, self._body = LOAD[kind]
        self._model, self._out, self._faults = model, out, faults

    async def __call__(self, path, body, forward):
        content = json.loads(body) if path in VERSION else {}
        version = str(content.get(VERSION.get(path), ""))
        fault = self._faults.get(int(version)) if version.isdecimal() else None
        if fault is None:
            return await forward()
        if fault == NOTHING:
            return json.dumps({"version": int(version), "success": True}).encode()
        if path == self._load:
            return await forward(path, json.dumps(content | {self._path: self._mixed(int(version), fault)}).encode())
        reply = await forward()
        load = self._body | {VERSION[self._load]: content[VERSION[path]], self._path: self._mixed(int(version), fault)}
        await forward(self._load, json.dumps(load).encode())
        return reply

    def _mixed(self, version: int, kept: str) -> str:
        directory = self._out.with_suffix(f".{version}.mixed")
        old, new = weights(self._out, version - 1), weights(self._out, version)
        shutil.copytree(self._model, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        mixed = {name: old[name] if KEPT[kept](name) else new[name] for name in new}
        save_file(mixed, directory / "model.safetensors", {"format": "pt"})
        return str(directory)


def weights(out: Path, version: int) -> dict[str, torch.Tensor]:
    return weights_of(Path(f"{out}.{version}.weights"))


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request, tmp_path_factory) -> tuple[str, Path, str]:
    """Kind, model and URL of an engine that serves experts, where it can behind a layer without any."""
    root = tmp_path_factory.mktemp(request.param)
    dense = {"vllm": [0], "sglang": []}[request.param]
    model = make_model(root / "models" / "a", 1, experts=EXPERTS, dense_layers=dense)
    with running_server(engine_config(model, kind=request.param, dtype="bf16"), root / "log", version=0) as url:
        yield request.param, model, url


@pytest.mark.parametrize(
    ("transport", "faults"),
    [("shared_storage", (NOTHING, *KEPT)), ("broadcast", (EVERYTHING, "layer 1 expert 5"))],
    ids=["shared_storage", "broadcast"],
)
def test_weights_that_an_engine_did_not_update_are_named(served, transport, faults):
    kind, model, url = served
    settings = {"shared_storage": {}, "broadcast": {"bucket_bytes": 200_000}}[transport]
    directory = model.parent.parent / transport
    check_named(*publish_faults(kind, model, url, directory, faults, transport=transport, **settings))


def test_an_engine_that_receives_deltas_holds_the_bits_of_the_whole_weights(served):
    kind, model, url = served
    policies = [model, *(UPDATE for _ in range(5))]
    settings = {"engine": {"kind": kind}, "dtype": "bf16", "timeout_s": 60, "full_every": 4}
    directory = model.parent.parent / "deltas"
    records, out = publish(directory, model, [url], policies, **settings), directory / OUT
    assert [record.get("error") for record in records] == [None] * len(policies)
    shares = [record["changed_share"] for record in records]
    assert [number for number, share in enumerate(shares) if share is None] == [0, 4]
    assert all(0 < share < 0.01 for share in shares if share is not None)
    assert all(record["pause_s"] > 0 for record in records)
    sent = fingerprint(weights(out, len(policies)))
    config = engine_config(model, kind=kind, dtype="bf16")
    assert differing(sent, with_engine(config, url, lambda engine: engine.weights_fingerprint())) == []


def publish_faults(kind: str, model: Path, url: str, directory: Path, faults: tuple[str, ...], **weight_sync):
    """Publish once for each of `faults`, between sound publishes; return the input of `check_named`."""
    by_version, out = dict(enumerate(faults, 3)), directory / OUT
    with Proxy(url, KeepsOld(kind, model, out, by_version)) as proxy:
        policies = [model, UPDATE, *(UPDATE for _ in faults), UPDATE]
        settings = {"engine": {"kind": kind}, "dtype": "bf16", "timeout_s": 60, **weight_sync}
        return publish(directory, model, [proxy.url], policies, **settings), out, proxy.url, by_version


def check_named(records: list[dict], out: Path, url: str, by_version: dict[int, str]) -> None:
    for version, record in enumerate(records, 1):
        fault, error = by_version.get(version), record.get("error", "")
        if fault is None:
            assert not error
            assert record["engines"] == 1
        elif fault == NOTHING:
            assert url in error
        else:
            groups = changed_groups(weights(out, version - 1), weights(out, version))
            everything = ", ".join(groups[:8]) + (f" and {len(groups) - 8} more" if len(groups) > 8 else "")
            shown = everything if fault == EVERYTHING else fault
            assert f"has other weights than the trainer sent: {shown}. Its version does not show this" in error


def changed_groups(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[str]:
    """Return the changed groups in order, and check that fewer than one element in a hundred changed."""
    changed = {name: int((old[name] != new[name]).sum()) for name in new}
    assert sum(changed.values()) < 0.01 * sum(tensor.numel() for tensor in new.values())
    return in_order({group_of(name) for name in new if changed[name]})


@pytest.mark.parametrize("kept", ["", "layer 0"])
def test_the_pool_admits_only_an_engine_that_has_the_published_weights(served, kept):
    """The publisher does not know the proxy's address, so the pool loads the directory into the engine behind it."""
    kind, model, url = served
    directory = model.parent.parent / f"pool{bool(kept):d}"
    publish(directory, model, [url], [model, UPDATE, UPDATE], engine={"kind": kind}, dtype="bf16", timeout_s=60)
    config = engine_config(model, kind=kind, dtype="bf16", health_interval_s=0.2, unavailable_timeout_s=20)
    published = PublishedFollower(RunDir(directory / "run").published, 5)

    async def suits(_engine) -> None:
        pass

    async def serves(proxy: str) -> str:
        services = {"engine-0": Service("engine-0", proxy, 0, "")}
        pool = EnginePool(
            config, services=lambda: services, published=published, build=lambda c, u: build_engine(c, u), check=suits
        )
        async with pool:
            try:
                return (await pool.select(group("g"), {})).name
            except NoEngineServes as error:
                return str(error)

    with Proxy(url, KeepsOld(kind, model, directory / OUT, {3: kept} if kept else {})) as proxy:
        answer = asyncio.run(serves(proxy.url))
    assert f"has other weights than the trainer sent: {kept}. " in answer if kept else answer == "engine-0"
