"""The line of a step, on one parameter and torch's Adam."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

from dppo_megatron.train.actor import StepLine
from dppo_megatron.train.actor.offload import SMALLEST_PIECE
from dppo_megatron.train.actor.optimizer import optimizer_step


def make_line(adam: torch.optim.Optimizer) -> StepLine:
    actor = SimpleNamespace(
        optimizer=SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam, is_stub_optimizer=False)]),
        optimizer_on_device=nullcontext,
        layout=SimpleNamespace(device=torch.device("cpu")),
        config=SimpleNamespace(parallel=SimpleNamespace(distributed_optimizer=False)),
    )
    return StepLine(actor)


def take_step(line: StepLine, adam: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> tuple[Tensor, Tensor]:
    """Start and end of one update with a random gradient."""
    line.mark_start()
    start = parameter.detach().clone()
    parameter.grad = torch.randn_like(parameter)
    adam.step()
    return start, parameter.detach().clone()


def test_copies_take_no_more_than_the_parameters_and_every_place_is_reached():
    """torch rounds pinned memory up to a power of two, so larger copies are made of pieces of that size."""
    parameter = torch.nn.Parameter(torch.randn(3, SMALLEST_PIECE // 4 + 5))
    adam = torch.optim.Adam([parameter], lr=0.5)
    line = make_line(adam)
    for _ in range(2):  # every step has its own end
        start, end = take_step(line, adam, parameter)
        for fraction in (0.5, 0.25, 0.0, 1.0):
            line.go_to(fraction)
            assert torch.equal(parameter, torch.lerp(start, end, fraction) if fraction else start)
    sizes = [copy.nbytes for copy in line._start]
    assert len(sizes) > 1
    assert sum(sizes) == parameter.nbytes
    assert all(size & (size - 1) == 0 for size in sizes if size >= SMALLEST_PIECE)


def test_after_a_reset_adam_steps_as_a_new_one():
    parameter = torch.nn.Parameter(torch.randn(100))
    adam = torch.optim.AdamW([parameter], lr=0.1)
    line = make_line(adam)
    for _ in range(3):
        take_step(line, adam, parameter)
    line.reset_moments()
    fresh = torch.nn.Parameter(parameter.detach().clone())
    fresh.grad = parameter.grad = torch.randn(100)
    adam.step()
    torch.optim.AdamW([fresh], lr=0.1).step()
    assert torch.equal(parameter, fresh)


def test_the_scale_reaches_the_learning_rate_of_every_group():
    """Megatron has one group with and one without weight decay, and two more for experts."""
    rates = []
    groups = [{"lr": 0.5}, {"lr": 0.5}, {"lr": 0.25}]
    optimizer = SimpleNamespace(
        param_groups=groups,
        prepare_grads=lambda: False,
        get_grad_norm=lambda: 1.0,
        step_with_ready_grads=lambda: rates.extend(group["lr"] for group in groups),
    )
    result = optimizer_step(optimizer, SimpleNamespace(step=lambda _: None), clip=0.0, lr_scale=0.5)
    assert rates == [0.25, 0.25, 0.125]
    assert result.lr == 0.25
