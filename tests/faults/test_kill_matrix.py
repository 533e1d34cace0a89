"""kill -9 of each part of a run in each phase of a step, under two trainer ranks: no step is lost or recorded twice.

One run for each kind of engine, which is resumed after every kill. Its server outlives it; engines are killed in
test_faults.py and test_sglang_faults.py.
"""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dppo_megatron.bank import BankReader
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.run_dir import RunDir
from tests.support.engines import engine_config
from tests.support.faults import Proxy, Run, command_line, fault_config, kill
from tests.support.runs import GROUPS, descendants, run, start_engine, steps_done, write_config

pytestmark = pytest.mark.faults

SAVED = 2
LIFE_S = 180.0  # until a life reaches its phase, on two busy cores
ROUTES = {
    "vllm": {"/dppo/generate": "sampling", "/dppo/load_weights": "publishing"},
    "sglang": {"/generate": "sampling", "/update_weights_from_disk": "publishing"},
}
CELLS = {
    "vllm": [
        *(("trainer", phase) for phase in ("saving", "training", "publishing", "sampling")),
        *(("orchestrator", phase) for phase in ("sampling", "publishing")),
        ("launcher", "saving"),
    ],
    "sglang": [("trainer", "publishing"), ("orchestrator", "sampling")],  # the requests that SGLang has then
}


class Phases:
    """Acts once where a phase is reached; where an engine is asked for it, inside its request."""

    def __init__(self, kind: str):
        self._routes = ROUTES[kind]
        self.waits_for = ""
        self.published = False  # in this life, which begins with a publish
        self.act: Callable[[], None] = lambda: None

    async def __call__(self, path, body, forward):
        phase = self._routes.get(path)
        if phase == "sampling" and b"group-" not in body:  # a probe
            phase = None
        self.reached(phase)
        reply = await forward()
        self.published |= phase == "publishing"
        return reply

    def reached(self, phase: str | None) -> None:
        if phase and phase == self.waits_for:
            self.waits_for = ""
            self.act()


def tree_of(task: Path, directory: Path, kind: str, url: str) -> dict:
    tree = fault_config(task, directory, urls=[url], kind=kind)
    tree["parallel"] |= {"world_size": 2, "tensor": 2}
    tree["checkpoint"] = {"every": SAVED}  # so that steps are trained, and recorded, again
    tree["rollout"]["max_response_tokens"] = 16
    return tree


def live(life: Run, part: str, phase: str, phases: Phases, rank: int) -> None:
    """Until `part` is killed in `phase` of the first step that this life trains; all of the run is gone then."""
    own, said = RunDir(life.dir), life.output.stat().st_size if life.output.exists() else 0
    first = own.checkpoint_step or 0
    killed: list[psutil.Process] = []

    def act() -> None:
        children = descendants(life.process)
        victims = (
            [p for p in children if f"dppo_megatron {part}" in command_line(p)]
            if part != "launcher"
            else [life.process]
        )
        killed.extend(children)
        kill(victims[rank % len(victims)].pid)

    phases.act, phases.published = act, False
    if phase == "sampling":
        phases.waits_for = phase
    # A life begins with a publish; the one after a step is meant.
    reader = BankReader(life.dir / "bank")
    deadline = time.monotonic() + LIFE_S
    trained = (first + 1) * GROUPS
    while not killed:
        assert time.monotonic() < deadline, f"{part}, {phase}:\n{life.story()}"
        assert life.process.poll() is None, f"{part}, {phase}: the run ended before:\n{life.story()}"
        full = (life.dir / "bank").exists() and reader.refresh() >= trained
        full = full and phases.published
        if full and phase in ("training", "publishing"):
            phases.waits_for = phase
        if full and phase == "training":
            phases.reached(phase)
        saved = (first // SAVED + 1) * SAVED
        if phase == "saving" and any((life.dir / "checkpoints").glob(f"*step-{saved:06d}*")):
            phases.waits_for = phase
            phases.reached(phase)
        time.sleep(0.002)
    if part == "launcher":
        life.process.wait(30)
    else:
        assert life.process.wait(60) == 1, life.story()
        reported = life.output.read_text()[said:]
        assert {"orchestrator": "orchestrator ended", "trainer": "trainer-"}[part] in reported
        assert "SIGKILL" in reported
    _, alive = psutil.wait_procs(killed, timeout=10)
    assert not alive, f"{part}, {phase}"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_step_is_lost_or_recorded_twice(task, tmp_path, tmp_path_factory, request, kind):
    if kind == "sglang" and not KINDS[kind].python(engine_config(tmp_path, kind=kind)).exists():
        pytest.skip("needs SGLang's environment (make sglang)")
    if kind == "vllm":
        engine = request.getfixturevalue("engines")[0]
    else:
        engine = start_engine(task, tmp_path_factory.mktemp("sglang"), kind=kind)
        request.addfinalizer(engine.end)
    phases = Phases(kind)
    with Proxy(engine.url, phases) as proxy:
        tree = tree_of(task, tmp_path / "run", kind, proxy.url)
        for number, (part, phase) in enumerate(CELLS[kind]):
            began = time.monotonic()
            life = Run(tree, tmp_path, *(("--resume",) if number else ()))
            request.addfinalizer(life.end)
            live(life, part, phase, phases, number)
            steps = steps_done(tmp_path / "run")
            print(f"{kind} | {part} | {phase} | steps {steps} recorded | {time.monotonic() - began:.0f} s")
            assert steps == list(range(1, len(steps) + 1)), f"{part}, {phase}"
        life = Run(tree, tmp_path, "--resume")
        request.addfinalizer(life.end)
        life.wait_to_end(LIFE_S)
    life.check_whole()
    if kind == "vllm":  # SGLang's batches decide about last bits
        undisturbed = tree_of(task, tmp_path / "undisturbed", kind, engine.url)
        run("train", write_config(undisturbed, tmp_path / "u.yaml"))
        life.check_equals(tmp_path / "undisturbed")
