"""Drafts with ids that the vocabulary lacks end the engine: a request that comes afterwards finds it dead.

Run from a clone's root, takes a minute: PYTHONPATH=. python tests/reproducers/foreign_drafts.py
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from dppo_megatron.rollout.engines.protocol import EngineError, GenerateRequest
from tests.support.engines import VOCAB, engine_config, make_model, running_server, with_engine


async def wrong_replies(engine):
    plain = GenerateRequest("plain", np.array([5, 9, 33, 2], np.int32), 1, (7,), 1.0, 20)
    (want,) = await engine.generate(plain)
    foreign = np.array([VOCAB + 5, 10**6], np.int32)
    start = np.concatenate([plain.token_ids, want.token_ids[:3], foreign]).astype(np.int32)
    wrong = 0
    for name, drafts in (("drafts", (start, start)), ("afterwards", ())):
        try:
            (got,) = await engine.generate(replace(plain, request_id=name, drafts=drafts))
            found = "" if np.array_equal(got.token_ids, want.token_ids) else "other tokens"
        except EngineError as error:
            found = str(error)[:160]
        wrong += bool(found)
        print("WRONG" if found else "right", name, found)
    return wrong


with tempfile.TemporaryDirectory() as folder:
    config = engine_config(make_model(Path(folder, "model"), 0), draft_tokens=4, draft_batch=8)
    with running_server(config, Path(folder, "log"), 0) as url:
        code = int(with_engine(config, url, wrong_replies) > 0)
sys.exit(code)
