"""The parts of gpu_day.py that broadcast weights: to plain receivers, one of which is killed, and to a vLLM server.

python benchmarks/gpu_broadcast.py broadcast --device cpu --work /tmp/day --receivers 2

`broadcast`: this process sends as a trainer rank does, through our rendezvous, plan and process group: NCCL between
separate processes with a GPU each, gloo on CPUs. Then the last receiver kills itself inside a bucket. The sender must
get an error within the time-out, which names the bucket, and then form a group with the other receivers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_case import QWEN3_06B, ROOT, SIZES, TINY
from gpu_values import require, require_value, values_checked

TIMEOUT_S = {"cuda": 15.0, "cpu": 4.0}  # limit of one step of the group
START_S = 90.0  # limit of a receiver's start: importing torch on a busy machine, and creating its context
SLACK_S = 5.0
TENSOR = {"cuda": (4096, 8192), "cpu": (64, 512)}  # bf16: 64 MiB, 64 KiB
TENSORS = 64
BUCKET = {"cuda": 256 << 20, "cpu": 256 << 10}  # bytes: 16 buckets
REPEATS = 3


def tensors(device: torch.device, kind: str, seed: int) -> Any:
    """Yield (name, tensor) of random weights; each tensor overwrites the one before."""
    generator = torch.Generator(device=device).manual_seed(seed)
    values = torch.empty(TENSOR[kind], dtype=torch.int16, device=device)
    for number in range(TENSORS):
        values.random_(0, 1 << 15, generator=generator)
        yield f"model.layers.{number}.mlp.up_proj.weight", values.view(torch.bfloat16)


def same_tensor(device: torch.device, kind: str) -> Any:
    """Return weights that exist before the clock starts, so that only packing and sending are timed."""
    values = torch.zeros(TENSOR[kind], dtype=torch.bfloat16, device=device)
    return [(f"model.layers.{number}.mlp.up_proj.weight", values) for number in range(TENSORS)]


def device_of(kind: str, number: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


class Receiver:
    """A process that joins groups and receives weights, controlled by lines of JSON on its standard input."""

    def __init__(self, number: int, kind: str, log: Path):
        self.number, self._log = number, log
        command = [sys.executable, __file__, "receiver", "--device", kind, "--number", str(number)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )

    def tell(self, **request: Any) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")

    def reply(self, timeout_s: float) -> dict[str, Any]:
        told, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if told else ""
        require(
            bool(line), f"receiver {self.number} did not answer in {timeout_s:.0f} s\n{self._log.read_text()[-2000:]}"
        )
        return json.loads(line)


def receiver(number: int, kind: str) -> None:
    """Run the process of a receiver. `die`: kill it after the first bucket, while the second is under way."""
    import signal

    from dppo_megatron.rollout.engines.vllm.extension.receiver import WeightReceiver
    from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
    from dppo_megatron.weights.fingerprint import add
    from dppo_megatron.weights.process_group import WeightGroupError

    device, joined = device_of(kind, 1 + number), None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        started = time.monotonic()
        try:
            if "plan" in request:
                if joined is not None:
                    joined.close()
                joined = WeightReceiver(WeightGroupPlan.from_json(request["plan"]), request["worker"], device)
            else:
                held: dict[str, int] = {}
                for bucket in joined.receive(request["step"]):
                    for name, tensor in bucket if request["sum"] else ():
                        add(held, name, tensor)
                    if request["die"]:
                        os.kill(os.getpid(), signal.SIGKILL)
                reply["fingerprint"] = held
        except WeightGroupError as error:
            reply["error"] = str(error)
        print(json.dumps(reply | {"seconds": time.monotonic() - started}), flush=True)


@dataclass
class Group:
    """A weight group with this process as its sender."""

    kind: str
    receivers: list[Receiver]
    name: str

    def __post_init__(self) -> None:
        from dppo_megatron.weights.broadcast_plan import TensorSpec, WeightGroupPlan, make_buckets
        from dppo_megatron.weights.process_group import WeightRendezvous, nccl_version

        self._device, timeout_s, workers = device_of(self.kind, 0), TIMEOUT_S[self.kind], len(self.receivers)
        specs = [TensorSpec.from_tensor(name, tensor) for name, tensor in same_tensor(self._device, self.kind)]
        self.buckets = make_buckets(specs, BUCKET[self.kind])
        self.nbytes = sum(spec.nbytes for spec in specs)
        backend, nccl = ("nccl", nccl_version()) if self.kind == "cuda" else ("gloo", "")
        self._rendezvous = WeightRendezvous.host(self.name, workers, timeout_s, loopback=True)
        port = self._rendezvous.port
        plan = WeightGroupPlan(self.name, "127.0.0.1", port, backend, timeout_s, workers, (self.buckets,), nccl=nccl)
        started = time.monotonic()
        for worker, each in enumerate(self.receivers):
            each.tell(plan=plan.to_json(), worker=worker)
        self._rendezvous.wait("join")
        self._channel = self._rendezvous.channel(plan.group(0), 0, backend, "127.0.0.1", self._device)
        for each in self.receivers:
            require("error" not in (reply := each.reply(timeout_s + SLACK_S)), f"a receiver did not join: {reply}")
        print(f"  1 + {workers} processes formed a {backend} {nccl} group in {time.monotonic() - started:.2f} s")

    def send(self, step: str, weights: Any, *, add_up: bool = False, dies: Receiver | None = None) -> dict[str, int]:
        """Return the fingerprint of the sent weights. Abort the step before WeightGroupError, as a trainer does."""
        from dppo_megatron.train.weight_sync.broadcast import _BucketStream
        from dppo_megatron.weights.fingerprint import add
        from dppo_megatron.weights.process_group import WeightGroupError

        sent: dict[str, int] = {}
        for each in self.receivers:
            each.tell(step=step, sum=add_up, die=each is dies)
        stream = _BucketStream(self._channel, self.buckets, self._device, step)
        try:
            for name, tensor in weights:
                stream.add(name, tensor)
                if add_up:
                    add(sent, name, tensor)
            stream.finish()
        except WeightGroupError as error:
            self._rendezvous.abort(step, str(error))
            self._channel.close()
            raise
        return sent

    def close(self) -> None:
        self._channel.close()


def checked(group: Group, kind: str, step: str, seed: int) -> None:
    sent = group.send(step, tensors(device_of(kind, 0), kind, seed), add_up=True)
    for each in group.receivers:
        reply = each.reply(TIMEOUT_S[kind] + SLACK_S)
        require("error" not in reply, f"receiver {each.number}: {reply}")
        require_value(
            reply["fingerprint"] == sent, f"the weights of receiver {each.number} differ from those that were sent"
        )
    require(len(sent) == TENSORS, "not every tensor was sent")
    same = "the same" if values_checked() else "not compared"
    print(f"  {step}: fingerprints of {len(sent)} layers: {same} on {len(group.receivers)} receivers")


def broadcast(kind: str, work: Path, count: int) -> None:
    receivers = [Receiver(number, kind, work / f"receiver-{number}.log") for number in range(count)]
    try:
        for each in receivers:
            each.reply(START_S)
        group = Group(kind, receivers, "first")
        checked(group, kind, "values", seed=1)
        weights = same_tensor(device_of(kind, 0), kind)
        for number in range(REPEATS):
            started = time.monotonic()
            group.send(f"timed-{number}", weights)
            for each in receivers:  # the sender may be done before them
                require("error" not in (reply := each.reply(TIMEOUT_S[kind])), f"receiver {each.number}: {reply}")
            seconds = time.monotonic() - started
            size = f"{group.nbytes / 1e9:.3f} GB in {len(group.buckets)} buckets"
            print(f"  {size}: {seconds:.3f} s, {group.nbytes / 1e9 / seconds:.2f} GB/s to each of {count}", flush=True)
        _lose_one(group, kind, receivers, weights)
    finally:
        for each in receivers:
            each.process.kill()
            each.process.wait()


def _lose_one(group: Group, kind: str, receivers: list[Receiver], weights: Any) -> None:
    from dppo_megatron.weights.process_group import WeightGroupError

    victim, survivors = receivers[-1], receivers[:-1]
    started, problem = time.monotonic(), ""
    try:
        group.send("killed", weights, dies=victim)
    except WeightGroupError as error:
        problem = str(error)
    seconds = time.monotonic() - started
    print(f"  receiver {victim.number} killed in a bucket: {seconds:.1f} s, {problem or 'no error'}", flush=True)
    require(victim.process.wait(SLACK_S) == -9, "the receiver that kills itself did not")
    require(bool(re.match(r"bucket \d+ of \d+ ", problem)), f"the sender's error does not name the bucket: {problem!r}")
    require(seconds < TIMEOUT_S[kind] + SLACK_S, f"the sender noticed only after {seconds:.1f} s")
    for each in survivors:
        reply = each.reply(TIMEOUT_S[kind] + SLACK_S)
        print(f"  receiver {each.number} after {reply['seconds']:.1f} s: {reply.get('error')}")
        require("error" in reply, f"receiver {each.number} accepted weights with a missing bucket")
    if survivors:
        again = Group(kind, survivors, "second")
        checked(again, kind, "after the loss", seed=2)
        again.close()
    else:
        print("  no receiver is left: with three GPUs or more the group is formed again with the others")
    if kind == "cuda":  # a watchdog might end this process
        time.sleep(max(0.0, started + TIMEOUT_S[kind] + SLACK_S - time.monotonic()))
    for each in survivors:
        require(each.process.poll() is None, f"receiver {each.number} ended, perhaps by a watchdog")
    print(f"  {time.monotonic() - started:.0f} s later the sender and {len(survivors)} receivers are alive")


def vllm(kind: str, work: Path, tensor_parallel: int) -> None:
    """Publish two policies from a trainer of one rank to a server with workers on other GPUs."""
    from dppo_megatron.hf import make_random_hf_model
    from dppo_megatron.rollout.fleet.registry import free_port
    from tests.support.engines import engine_config, make_secret, running_server
    from tests.train.weight_sync.trainer_process import PROBE

    dtype, shape = ("bf16", QWEN3_06B) if kind == "cuda" else ("fp32", TINY)
    wide = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    bound = 0.3 if dtype == "bf16" else 1e-4  # limit of log-prob differences
    home = work / "vllm"
    home.mkdir(exist_ok=True)
    policies = [home / "models" / name for name in "ab"]
    for seed, directory in enumerate(policies, 1):
        directory.parent.mkdir(exist_ok=True)
        make_random_hf_model(directory, shape, seed=seed, dtype=wide)
    devices = {}
    if kind == "cuda":
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        visible = visible or [str(number) for number in range(1 + tensor_parallel)]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible[1 : 1 + tensor_parallel])}  # the trainer has the first
    config = engine_config(policies[0], dtype=dtype, tensor_parallel=tensor_parallel)
    engine = config.engine.model_copy(update={"env": config.engine.env | devices})
    config = config.model_copy(update={"engine": engine})
    make_secret(config)
    started = time.monotonic()
    with running_server(config, work / "vllm-server.log", version=0) as url:
        print(f"  a server of {tensor_parallel} workers was up after {time.monotonic() - started:.0f} s", flush=True)
        tree = {
            "run": {"dir": str(home / "run")},
            "model": {"path": str(policies[0]), "dtype": dtype},
            "parallel": {"timeout_s": 60},
            "train": {"steps": 1},
            "optimizer": {"lr": 1e-6},
            "data": {"train": "unused"},
            "engine": {
                **{"urls": [url], "dtype": dtype, "max_model_len": 512, "unavailable_timeout_s": 10},
                "secret_file": str(config.engine.secret_file or policies[0].parent / "secret"),
            },
            "weight_sync": {
                **{"timeout_s": 60, "transport": "broadcast", "fingerprint": True},
                **({"probe_tolerance": bound} if kind == "cuda" else {}),
            },
        }
        (home / "config.json").write_text(json.dumps(tree))
        out = home / "records.json"
        command = [sys.executable, "-m", "tests.train.weight_sync.trainer_process", str(home / "config.json"), str(out)]
        environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port())}
        code = subprocess.run(
            [*command, *map(str, (policies[1], policies[0], policies[1]))], env=environment
        ).returncode
        tail = (work / "vllm-server.log").read_text(errors="replace")[-2000:]
        require(code == 0, f"the trainer ended with {code}; the end of the server's log:\n{tail}")
    for number, record in enumerate(json.loads(out.read_text()), 1):
        require("error" not in record, f"publish {number}: {record.get('error')}")
        print(
            f"  publish {number}: {record['seconds']:.2f} s, engine paused {record['pause_s']:.2f} s; fingerprints are "
            f"the same; log-probs of {len(PROBE) - 1} tokens differ by {record['difference']:.2e} at most"
        )
        require_value(record["difference"] < bound, f"publish {number}: log-probs differ by more than {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("broadcast", "vllm_tp2", "receiver"))
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, help="directory that the parts share")
    parser.add_argument("--receivers", type=int, default=2, help="receivers of the group, or workers of a vLLM server")
    parser.add_argument("--number", type=int, help="number of the receiver that this process runs")
    arguments = parser.parse_args()
    if arguments.part == "receiver":
        return receiver(arguments.number, arguments.device)
    arguments.work.mkdir(parents=True, exist_ok=True)
    part = broadcast if arguments.part == "broadcast" else vllm
    part(arguments.device, arguments.work, arguments.receivers)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
