"""Engines without a model: servers that answer from a table, with the protocol of a vLLM server with our extension.

    python benchmarks/table_engines.py SETTINGS.json

Serves many engines in one process until its stdin ends, and prints their ports as JSON. The seed of a sample determines
its length, and its tokens come from one table of valid rows. The answer arrives when an engine of the given rate would
have sampled the last token. Some engines stop answering for a while; some close connections and restart as another
instance.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dppo_megatron.rollout.engines.protocol import EngineInfo
from dppo_megatron.rollout.engines.vllm.extension.wire import encode_reply

EOS = 1  # end-of-sequence token of the tokenizer in tests.support.tokenizers
FIRST_TOKEN, LAST_TOKEN = 2, 98  # range of sampled tokens
PIECE = 1 << 18  # bytes written at once


@dataclass(frozen=True)
class TableSettings:
    engines: int
    faults: dict[int, str]  # engine: "stall" | "die"
    fault_s: float
    longest: int  # most tokens of a response
    median: float  # median of the lognormal lengths
    sigma: float
    topk: int
    layers: int  # layers with experts
    experts: int
    experts_per_token: int
    tokens_per_s: float  # rate of every sample
    vocab_size: int
    max_model_len: int
    model: str
    seed: int = 0

    def length(self, seed: int) -> int:
        """Return the length of the sample with this seed."""
        draw = np.random.default_rng([self.seed, seed]).normal()
        return int(np.clip(np.exp(np.log(self.median) + self.sigma * draw), 1, self.longest))


class Table:
    """Token values that pass every check of the client."""

    def __init__(self, settings: TableSettings):
        s = self.settings = settings
        rng = np.random.default_rng(s.seed)
        rows, width = 2 * s.longest, max(s.topk, 1)
        weights = -np.sort(-rng.exponential(size=(rows, width)), axis=1)
        logprobs = np.log(0.99 * weights / weights.sum(1, keepdims=True)).astype(np.float32)
        ids = rng.permuted(np.tile(np.arange(FIRST_TOKEN, LAST_TOKEN, dtype=np.int32), (rows, 1)), axis=1)[:, :width]
        drawn = rng.integers(0, width, rows)
        self.token_ids = ids[np.arange(rows), drawn]
        self.logprobs = logprobs[np.arange(rows), drawn]
        self.topk_ids, self.topk_logprobs = np.ascontiguousarray(ids), logprobs
        first = rng.integers(0, s.experts, (rows + 4096, s.layers, 1))
        each = (first + np.arange(s.experts_per_token)) % s.experts
        self.experts = each.astype(np.uint8 if s.experts <= 256 else np.uint16)

    def arrays(self, request: dict[str, Any], lengths: list[int], versions: list[np.ndarray]) -> dict[str, np.ndarray]:
        starts = [seed % (len(self.token_ids) - length) for seed, length in zip(request["seeds"], lengths, strict=True)]
        rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        ends = np.cumsum(lengths) - 1
        token_ids = np.concatenate([self.token_ids[r] for r in rows])
        token_ids[ends[np.array(lengths) < request["max_tokens"]]] = EOS
        arrays = {
            "lengths": np.array(lengths, np.int32),
            "token_ids": token_ids,
            "rollout_logprob": np.concatenate([self.logprobs[r] for r in rows]),
            "versions": np.concatenate(versions),
        }
        if k := request["topk"]:
            arrays["topk_ids"] = np.concatenate([self.topk_ids[r, :k] for r in rows])
            arrays["rollout_topk_logprob"] = np.concatenate([self.topk_logprobs[r, :k] for r in rows])
        if request["routed_experts"]:
            read = len(request["token_ids"]) - 1
            arrays["routed_experts"] = np.concatenate([self.experts[r.start : r.stop + read] for r in rows])
        return arrays


class Gone(Exception):
    """The engine died with this connection."""


class TableEngine:
    """One server. Its `fault` happens once, after its second request."""

    def __init__(self, table: Table, fault: str | None, writing: asyncio.Semaphore):
        self._table, self._fault = table, fault
        self._writing = writing  # limits the replies that this process encodes and writes at the same time
        self._requests = 0
        self._stalled_until = 0.0
        self._connections: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._restart()

    def _restart(self) -> None:
        self._instance, self._versions = uuid4().hex, [(0.0, 0)]  # (time, version served from then on)
        self._running = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 22)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while line := await reader.readline():
                headers = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(headers.split(b"content-length:")[1].split()[0]) if b"content-length:" in headers else 0
                body = json.loads(await reader.readexactly(size)) if size else {}
                await self._while_stalled()
                await self._answer(line.split()[1].decode(), body, writer)
        except (OSError, Gone, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/dppo/generate":
            await self._generate(body, writer)
            return
        if path == "/dppo/load_weights":
            self._versions.append((time.monotonic(), body["version"]))
            reply: Any = {"version": body["version"], "paused_s": 0.0}
        else:
            reply = self._info() if path == "/dppo/info" else {}
        _head(writer, "application/json", len(content := json.dumps(reply).encode()))
        writer.write(content)
        await writer.drain()

    def _info(self) -> dict[str, Any]:
        s = self._table.settings
        info = EngineInfo(
            version=self._versions[-1][1],
            vocab_size=s.vocab_size,
            max_model_len=s.max_model_len,
            max_logprobs=64,
            logprobs_mode="processed_logprobs",
            dtype="bfloat16",
            model=s.model,
            engine="table",
            running=self._running,
            routed_experts=s.layers > 0,
            instance=self._instance,
        )
        return asdict(info)

    async def _generate(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        settings, instance, began = self._table.settings, self._instance, time.monotonic()
        self._requests += 1
        if self._fault is not None and self._requests > 2:
            fault, self._fault = self._fault, None
            self._breaking = asyncio.create_task(self._break(fault))
        lengths = [min(settings.length(seed), request["max_tokens"]) for seed in request["seeds"]]
        self._running += 1
        await asyncio.sleep(max(lengths) / settings.tokens_per_s)
        await self._while_stalled()
        if self._instance != instance:
            raise Gone
        self._running -= 1
        async with self._writing:
            arrays = self._table.arrays(request, lengths, [self._versions_of(began, n) for n in lengths])
            reasons = ["length" if n == request["max_tokens"] else "stop" for n in lengths]
            header = {"request_id": request["request_id"], "finish_reasons": reasons, "instance": instance}
            reply = encode_reply(header, arrays)
            del arrays
            _head(writer, "application/x-safetensors", len(reply))
            for begin in range(0, len(reply), PIECE):
                writer.write(reply[begin : begin + PIECE])
                await writer.drain()

    def _versions_of(self, began: float, tokens: int) -> np.ndarray:
        """Return the version of each token, [tokens] int32. Running requests continue with newly loaded weights."""
        first = bisect.bisect_right(self._versions, (began, 1 << 60)) - 1
        versions = np.full(tokens, self._versions[first][1], np.int32)
        for since, version in self._versions[first + 1 :]:
            versions[int((since - began) * self._table.settings.tokens_per_s) :] = version
        return versions

    async def _while_stalled(self) -> None:
        while (left := self._stalled_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def _break(self, fault: str) -> None:
        down_s = self._table.settings.fault_s
        if fault == "stall":
            self._stalled_until = time.monotonic() + down_s
            return
        self._server.close()
        self._restart()
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(down_s)
        await self.start()


def _head(writer: asyncio.StreamWriter, kind: str, size: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind.encode(), size))


async def serve(settings: TableSettings) -> None:
    table, writing = Table(settings), asyncio.Semaphore(8)
    engines = [TableEngine(table, settings.faults.get(i), writing) for i in range(settings.engines)]
    for engine in engines:
        await engine.start()
    print(json.dumps([engine.port for engine in engines]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    fields = json.loads(Path(sys.argv[1]).read_text())
    fields["faults"] = {int(engine): fault for engine, fault in fields["faults"].items()}
    asyncio.run(serve(TableSettings(**fields)))


if __name__ == "__main__":
    main()
