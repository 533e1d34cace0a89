"""Provides tiny random models, real servers for them, and a reference for their samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dppo_megatron.config.model import LoraConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_shapes
from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE
from dppo_megatron.rollout.engines.kinds import build_engine, kind_of, server_environment
from dppo_megatron.rollout.engines.protocol import Engine, GenerateRequest
from dppo_megatron.rollout.engines.secret import make_secret, read_secret
from dppo_megatron.rollout.fleet.registry import free_port
from tests.support.configs import make_config

if TYPE_CHECKING:
    import torch

VOCAB = 64
MAX_MODEL_LEN = 512
MAX_LOGPROBS = 16
EOS = 1
EXPERTS = 8
PROMPT = np.array([5, 9, 33, 2, 17, 60, 8, 8, 41, 3], dtype=np.int32)
START_TIMEOUT_S = 900
END_S = 3  # grace period; SGLang would wait longer for requests that do not exist
READY = {"vllm": "health", "sglang": "server_info"}  # answers once the server can sample

Result = TypeVar("Result")


def make_model(directory: Path, seed: int, *, experts: int = 0, dense_layers: Sequence[int] = ()) -> Path:
    """Write a random Qwen3 (4 layers, hidden 64, 64 characters) with distributions that are neither flat nor peaked.

    With `experts`, write a Qwen3-MoE with that many experts, 2 per token, in all layers but `dense_layers`.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    mixture["mlp_only_layers"] = list(dense_layers)
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        **(mixture if experts else {}),
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest the CPU attention kernels take
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=not experts,  # as in the Qwen3 family
        initializer_range=0.2,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    characters = ["<pad>", "<eos>", *(chr(33 + i) for i in range(VOCAB - 2))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)
    return directory


def make_adapter(directory: Path, model: Path, lora: LoraConfig, seed: int, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a random adapter for `model` as published, with `changes` in adapter_config.json; return the tensors."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(read_hf_config(model), lora)
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    directory.mkdir()
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    written = {"peft_type": "LORA", "r": lora.r, "lora_alpha": lora.r, "target_modules": list(lora.targets)}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(written | changes))
    return tensors


def group(
    name: str,
    *,
    n: int = 4,
    first_seed: int = 100,
    temperature: float = 1.0,
    max_tokens: int = 24,
    stop: tuple[int, ...] = (),
    topk: int = 0,
    prompt: np.ndarray = PROMPT,
    experts: bool = False,
    **truncation: float,
) -> GenerateRequest:
    seeds = tuple(range(first_seed, first_seed + n))
    return GenerateRequest(name, prompt, n, seeds, temperature, max_tokens, stop, topk, experts, **truncation)


def engine_config(model: Path, *, routing_replay: bool = False, **engine) -> Config:
    settings = {
        "dtype": "fp32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 256,
        "max_logprobs": MAX_LOGPROBS,
        "kv_cache_bytes": 2**28,
        "request_timeout_s": 120,
        "env": {
            ROOTS_VARIABLE: str(model.parent.parent),  # several runs share a server
            "VLLM_SERVER_DEV_MODE": "1",  # enables vLLM's routes that sleep and call worker methods
        },
    }
    return make_config(
        run={"dir": model.parent},
        model={"path": model},
        data={"train": model.parent / "none.jsonl", "max_prompt_tokens": 256},
        engine=settings | engine,
        rollout={"max_response_tokens": 64, "topk_logprobs": 8, "routing_replay": routing_replay},
        weight_sync={"timeout_s": 60},
    )


@contextlib.contextmanager
def running_server(config: Config, log: Path, version: int) -> Iterator[str]:
    """Start a server and yield the URL. On exit, end the server and all child processes."""
    port = free_port()
    make_secret(config)
    with log.open("wb") as output:
        server = subprocess.Popen(
            kind_of(config).command(config, port, config.model.path, version),
            env=os.environ | server_environment(config, version),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all processes can be ended together
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(server, f"{url}/{READY[config.engine.kind]}", read_secret(config), log)
        yield url
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_until_up(server: subprocess.Popen, url: str, secret: str, log: Path) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {secret}"})
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(request, timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start; the end of its log:\n{log.read_text()[-3000:]}")


def with_engine(config: Config, url: str, use: Callable[[Engine], Awaitable[Result]], timeout_s: float = 120) -> Result:
    """Return the result of `use` on a new client in a new event loop."""

    async def main() -> Result:
        engine = build_engine(config, url)
        try:
            async with asyncio.timeout(timeout_s):
                return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


class Reference:
    """Computes the model in `directory` with transformers in fp64, so that only an engine rounds."""

    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, experts_implementation="eager"
        ).eval()

    def logprobs(self, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return the log-probs [R, V] of each response position at `temperature`."""
        from tests.support.in_double import InDouble

        torch = self._torch
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad(), InDouble():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double()
        return torch.log_softmax(logits / temperature, -1).numpy()

    def experts(self, token_ids: np.ndarray) -> np.ndarray:
        """Return each token's experts [S, L, k], most likely first."""
        from tests.support.in_double import InDouble

        torch = self._torch
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        with torch.no_grad(), InDouble():
            logits = self._model(ids, output_router_logits=True).router_logits
        chosen = [layer.topk(self._model.config.num_experts_per_tok, dim=-1).indices for layer in logits]
        return torch.stack(chosen, 1).numpy()

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs [S - 1] of each token after the first."""
        return self.sampled(token_ids[1:], token_ids[:1])

    def sampled(self, token_ids: np.ndarray, prompt: np.ndarray = PROMPT) -> np.ndarray:
        """Return the log-probs [R] of the response tokens after `prompt`."""
        return self.logprobs(prompt, token_ids)[np.arange(len(token_ids)), token_ids]
