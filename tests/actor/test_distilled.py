"""The gradient of every weight by a teacher is that of a float64 reference over the whole vocabulary."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.objectives import ObjectiveSettings
from tests.actor.scenarios import distilled
from tests.support.divergences import dense_loss
from tests.support.in_double import InDouble

EXACT = 1e-6  # relative; gradients are summed in fp32


@pytest.fixture(scope="module")
def reference(models):
    """f(kind, k, masks) -> the loss and the gradient of every weight, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64)

    @functools.cache
    def computed(kind: str, k: int, masks: bool):
        sequences, dense = distilled.given(k, masks)
        model.zero_grad()
        with InDouble():
            rows = []
            for s in sequences:
                ids = torch.tensor([*s.prompt_ids, *s.response_ids])
                rows.append(model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1])
            logits = torch.cat(rows) / distilled.TEMPERATURE
        loss = dense_loss(ObjectiveSettings(**distilled.settings(kind)), dense, logits).mean()
        loss.backward()
        return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}

    return computed


@pytest.mark.parametrize(("size", "layout"), [(size, name) for size in (1, 2) for name in distilled.LAYOUTS[size]])
def test_gradients_are_those_of_the_whole_vocabulary(on, reference, size, layout):
    """K = V is the divergence itself. Packed micro-batches with an engine's list, with and without sampling masks."""
    for case in distilled.CASES:
        loss, gradients = on(size, distilled.gradients)[layout, *case]
        expected, exact = reference(*case)
        if case[0] != "sampled":  # the loss of an advantage is no divergence
            assert loss == pytest.approx(expected, rel=EXACT), case
        assert gradients.keys() == exact.keys()
        error = sum((gradients[name].double() - exact[name]).square().sum() for name in exact).sqrt()
        assert error < EXACT * sum(gradient.square().sum() for gradient in exact.values()).sqrt(), case
