"""The line of a step, on one parameter and torch's Adam."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from dppo_megatron.actor import StepLine
from dppo_megatron.actor.offload import SMALLEST_PIECE


def test_copies_take_no_more_than_the_parameters_and_every_place_is_reached():
    """torch rounds pinned memory up to a power of two, so larger copies are made of pieces of that size."""
    parameter = torch.nn.Parameter(torch.randn(3, SMALLEST_PIECE // 4 + 5))
    adam = torch.optim.Adam([parameter], lr=0.5)
    actor = SimpleNamespace(
        optimizer=SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam, is_stub_optimizer=False)]),
        optimizer_on_device=nullcontext,
        layout=SimpleNamespace(device=torch.device("cpu")),
        config=SimpleNamespace(parallel=SimpleNamespace(distributed_optimizer=False)),
    )
    line = StepLine(actor)
    line.mark_start()
    start = parameter.detach().clone()
    parameter.grad = torch.randn_like(parameter)
    adam.step()
    end = parameter.detach().clone()
    for fraction in (0.5, 0.25, 0.0, 1.0):
        line.go_to(fraction)
        assert torch.equal(parameter, torch.lerp(start, end, fraction) if fraction else start)
    sizes = [copy.nbytes for copy in line._start]
    assert len(sizes) > 1
    assert sum(sizes) == parameter.nbytes
    assert all(size & (size - 1) == 0 for size in sizes if size >= SMALLEST_PIECE)
