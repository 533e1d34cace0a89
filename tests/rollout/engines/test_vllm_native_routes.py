"""Routed experts that vLLM records itself, as on GPUs, across an update in flight: each keeps the weights it ran under.

The scheduler and both ends of its connector are vLLM's own; the model, which needs a GPU, is replaced by rows
`[weights, position]`. `rollout.routing_replay` with `rollout.on_update: keep` relies on this.
"""

import numpy as np
import pytest


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_sampled_before_an_update_keep_their_routes(tmp_path, monkeypatch, in_flight):
    pytest.importorskip("vllm", reason="needs vLLM")
    from tests.rollout.engines.native_routes import PROMPT, RESPONSE, Engine, make_config

    config = make_config(tmp_path, monkeypatch)
    config.scheduler_config.async_scheduling = in_flight > 1
    engine = Engine(config, in_flight)
    engine.add("a", list(range(PROMPT)))
    engine.add("b", [*range(32), *range(8)])  # shares two blocks of the prefix cache with a
    sampled = {}
    for step in range(1, 200):
        engine.step()
        if step in (9, 17):
            engine.update_weights()
            sampled[engine.weights] = {n: engine.scheduler.requests[n].num_output_tokens for n in engine.chunks}
            if step == 9:
                engine.add("late", list(range(PROMPT)))
        if len(engine.finished) == 3:
            break
    for name in ("a", "b"):
        positions = np.concatenate(engine.chunks[name])[:, 0, 1]
        assert positions.tolist() == list(range(PROMPT + RESPONSE - 1))
        # Position p is read to sample the token at p + 1; with n sampled, p up to PROMPT + n - 2 ran before.
        expected = np.zeros(PROMPT + RESPONSE - 1, np.uint8)
        for weights, counts in sampled.items():
            assert 0 < counts[name] < RESPONSE
            expected[PROMPT + counts[name] - 1 :] = weights
        assert engine.routes(name)[:, 0].tolist() == expected.tolist()
    assert engine.routes("late")[:PROMPT, 0].tolist() == [1] * PROMPT, "routes of the prefix cache of older weights"
