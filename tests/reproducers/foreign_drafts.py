"""Drafts with ids that the vocabulary lacks end the engine: a request that comes afterwards finds it dead.

Run from a clone's root, takes a minute: PYTHONPATH=. python tests/reproducers/foreign_drafts.py
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.engines.kinds import build_engine, kind_of, server_environment
from dppo_megatron.engines.protocol import EngineError, GenerateRequest
from dppo_megatron.engines.secret import make_secret, read_secret

VOCAB = 59


def model(directory):
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        vocab_size=VOCAB,
        **sizes,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t1", pad_token="t0").save_pretrained(directory)


with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    model(work / "model")
    config = Config.model_validate(
        {
            "run": {"dir": folder},
            "model": {"path": str(work / "model"), "dtype": "fp32"},
            "train": {"steps": 1},
            "data": {"train": "x", "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 40},
            "engine": {
                "dtype": "fp32",
                "max_model_len": 128,
                "kv_cache_bytes": 2**27,
                "draft_tokens": 4,
                "draft_batch": 8,
            },
        }
    )
    make_secret(config)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with (work / "log").open("wb") as log:
        server = subprocess.Popen(
            kind_of(config).command(config, port, work / "model", 0),
            env=os.environ | server_environment(config, 0),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url, head = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {read_secret(config)}"}
    try:
        for _ in range(1500):
            try:
                urllib.request.urlopen(urllib.request.Request(url + "/health", headers=head), timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)

        async def go():
            engine = build_engine(config, url)
            plain = GenerateRequest("plain", np.array([5, 9, 33, 2], np.int32), 1, (7,), 1.0, 20)
            (want,) = await engine.generate(plain)
            start = np.concatenate(
                [plain.token_ids, want.token_ids[:3], np.array([VOCAB + 5, 10**6], np.int32)]
            ).astype(np.int32)
            wrong = 0
            for name, drafts in (("drafts", (start, start)), ("afterwards", ())):
                try:
                    (got,) = await engine.generate(replace(plain, request_id=name, drafts=drafts))
                    found = "" if np.array_equal(got.token_ids, want.token_ids) else "other tokens"
                except EngineError as error:
                    found = str(error)[:160]
                wrong += bool(found)
                print("WRONG" if found else "right", name, found)
            await engine.close()
            return wrong

        code = int(asyncio.run(go()) > 0)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
sys.exit(code)
