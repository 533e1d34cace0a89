"""Parts of `scale.py`: a run directory, processes that each read for several ranks, and measurements."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from dppo_megatron.bank import BankReader
from dppo_megatron.bank.files import segment_paths
from dppo_megatron.config import Config, read_config
from dppo_megatron.objectives import build_objective
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.trainer.batches import BankBatches
from dppo_megatron.types import TokenBatch
from tests.support.tokenizers import save_character_model

PARTS = ("core", "topk", "routes")  # parts that a rank of a last stage with experts reads
PROMPT_TOKENS = 64
BLOCK = 8 << 20  # bytes of one read when measuring the speed of the disk
LOOK_S = 0.05  # interval between samples of the processes' memory


@dataclass(frozen=True)
class Shape:
    """Shape of the model that determines routes and vocabulary of the engines' answers."""

    vocab_size: int = 128
    layers: int = 24
    experts: int = 64
    experts_per_token: int = 4


def write_run(root: Path, shape: Shape, settings: dict[str, dict[str, Any]], prompts: int) -> Path:
    """Write a model directory without weights, prompts, and a config with `settings`. Return the config's path."""
    model = save_character_model(root / "model", vocab_size=shape.vocab_size)
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "vocab_size": shape.vocab_size,
                "hidden_size": 64,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 64,
                "moe_intermediate_size": 32,
                "num_experts": shape.experts,
                "num_experts_per_tok": shape.experts_per_token,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
                "decoder_sparse_step": 1,
                "max_position_embeddings": 1 << 15,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "hidden_act": "silu",
            }
        )
    )
    rows = ({"prompt": f"{i:0{PROMPT_TOKENS}d}", "answer": "0"} for i in range(prompts))
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(root / "run")},
        "model": {"path": str(model)},
        "data": {"train": str(root / "train.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "objective": {"name": "dppo_topk_tv", "settings": {"delta": 0.2}},
        "reward": {"name": "scale_reward:even_length"},
        "checkpoint": {"every": 0},
        "weight_sync": {"fingerprint": False},
    }
    for name, section in settings.items():
        sections[name] = {**sections.get(name, {}), **section}
    path = root / "config.yaml"
    path.write_text(json.dumps(sections, indent=1))  # JSON is valid YAML
    RunDir(root / "run").weights.mkdir(parents=True)
    return path


def bank_batches(config: Config, rank: int) -> BankBatches:
    objective = build_objective(config.objective.name, **config.objective.settings)
    reader = BankReader(RunDir(config.run.dir).bank)
    return BankBatches(config, reader, objective, rank, config.data_parallel, PARTS)


@dataclass
class Reading:
    """Measurements of one rank reading a step."""

    rank: int
    seconds: float
    cpu_s: float
    file_bytes: int  # bytes requested from the file system, index and headers included
    batch_bytes: int  # bytes of the tensors
    tokens: int
    metrics: dict[str, float]


class RankProcesses:
    """Processes that read like the trainer's ranks. Each reads for several ranks, one after the other."""

    def __init__(self, config: Path, ranks: int, processes: int):
        context = multiprocessing.get_context("spawn")
        self.processes, self._pipes = [], []
        for number in range(processes):
            ours, theirs = context.Pipe()
            mine = range(number, ranks, processes)
            process = context.Process(target=_be_ranks, args=(str(config), mine, theirs), daemon=True)
            process.start()
            self.processes.append(process)
            self._pipes.append(ours)
        self._ask([("ranks",)] * processes)

    def read(self, step: int) -> tuple[float, list[Reading]]:
        """Return the seconds until every rank has read the batch of `step`, and the reading of each."""
        began = time.perf_counter()
        answers = self._ask([("read", step)] * len(self._pipes))
        return time.perf_counter() - began, [reading for answer in answers for reading in answer]

    def raw_speed(self, path: Path) -> float:
        """Return the MB/s at which the same number of processes only reads the uncached file."""
        drop_cache(path)
        size, count = path.stat().st_size, len(self._pipes)
        bounds = [size * i // count for i in range(count + 1)]
        began = time.perf_counter()
        self._ask([("raw", str(path), begin, end) for begin, end in itertools.pairwise(bounds)])
        return size / 1e6 / (time.perf_counter() - began)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)

    def _ask(self, questions: Sequence[tuple]) -> list[Any]:
        for pipe, question in zip(self._pipes, questions, strict=True):
            pipe.send(question)
        return [pipe.recv() for pipe in self._pipes]


def _be_ranks(config_path: str, ranks: range, pipe: Connection) -> None:
    config = read_config(config_path)
    batches = {rank: bank_batches(config, rank) for rank in ranks}
    while True:
        try:
            match pipe.recv():
                case ("ranks",):
                    pipe.send(list(ranks))
                case ("read", step):
                    pipe.send([_read(rank, of, step) for rank, of in batches.items()])
                case ("raw", path, begin, end):
                    pipe.send(_read_raw(path, begin, end))
        except EOFError:
            return


def _read(rank: int, batches: BankBatches, step: int) -> Reading:
    before, began, cpu = _bytes_asked(), time.perf_counter(), time.process_time()
    batch = batches.read(step)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    packed = [micro for update in batch.updates for micro in update.micro_batches]
    tensors = [getattr(micro, field.name) for micro in packed for field in fields(TokenBatch)]
    return Reading(
        rank=rank,
        seconds=seconds,
        cpu_s=cpu_s,
        file_bytes=_bytes_asked() - before,
        batch_bytes=sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)),
        tokens=sum(len(micro.token_ids) for micro in packed),
        metrics=batch.metrics,
    )


def _bytes_asked() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _read_raw(path: str, begin: int, end: int) -> int:
    buffer = np.zeros(BLOCK, np.uint8)
    file = os.open(path, os.O_RDONLY)
    try:
        while begin < end:
            begin += os.preadv(file, [buffer.data[: min(BLOCK, end - begin)]], begin)
    finally:
        os.close(file)
    return begin


def drop_cache(path: Path) -> None:
    """Drop a file from the page cache of this machine. A disk or a host below it may have another cache."""
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def segment(config: Config, step: int) -> Path:
    return segment_paths(RunDir(config.run.dir).bank, step)[0]


@dataclass
class Peaks:
    """Peaks of one process. Bytes are anonymous memory, private and shared; mapped files are page cache."""

    anonymous: int = 0
    files: int = 0  # open at the same time
    cpu_s: float = 0.0


class Watcher(threading.Thread):
    """Sample processes and their children every `LOOK_S`; shorter peaks may be missed."""

    def __init__(self, processes: dict[str, int]):
        super().__init__(daemon=True)
        self.peaks: dict[str, Peaks] = {}
        self._found = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._end = threading.Event()

    def run(self) -> None:
        look = 0
        while not self._end.wait(LOOK_S):
            for name, process in list(self._found.items()):
                self._look(name, process, thorough=look % 10 == 0)
            look += 1

    def end(self) -> dict[str, Peaks]:
        self._end.set()
        self.join()
        return self.peaks

    def _look(self, name: str, process: psutil.Process, thorough: bool) -> None:
        try:
            peaks = self.peaks.setdefault(name, Peaks())
            peaks.anonymous = max(peaks.anonymous, anonymous_bytes(process.pid))
            if not thorough:
                return
            peaks.files = max(peaks.files, process.num_fds())
            peaks.cpu_s = cpu_seconds(process.pid)
            if ":" not in name:
                for child in process.children(recursive=True):
                    self._found.setdefault(f"{name}: {child.pid}", child)
        except (psutil.Error, OSError):
            self._found.pop(name, None)


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process, 0 if it has just ended."""
    found = Path(f"/proc/{pid}/status").read_text()
    return sum(1024 * int(kb) for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", found, flags=re.M))


def cpu_seconds(pid: int) -> float:
    cpu = psutil.Process(pid).cpu_times()
    return cpu.user + cpu.system
