"""The parts of gpu_day.py that profile: kernels of an update, and the backend of attention with its values.

python benchmarks/gpu_profile.py sdpa --device cpu --work /tmp/day

sdpa: `PackedAttention` of the local layers calls FlashAttention in 16 bits on a GPU (`local.flash`). In other cases
torch selects the backend. The part first profiles an update of the model and prints the operators that ran forward and
backward. It then runs each backend by itself, and `local.flash`, on the calls that packed sequences of Qwen3-0.6B make.
It measures the time and compares outputs and gradients with the math backend in fp32 on the same inputs. The bound is
0.02 of the norm in bf16 and 1e-4 in fp32.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from gpu_case import Day, run, timed_updates
from gpu_values import Problems
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

OPERATOR = re.compile(r"^aten::_(\w*scaled_dot_product_|flash_attention_)\w*")
HOST = re.compile(r"^aten::|^autograd::|Backward0$")  # names of operators that are not kernels
KERNEL = re.compile(r"flash|fmha|cudnn|attention|sdp", re.IGNORECASE)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
REPEATS = 5
Inputs = tuple[torch.Tensor, ...]  # query, key, value, gradient of the output
Results = tuple[torch.Tensor, ...]  # output, gradients of query, key, value


@dataclass(frozen=True)
class Call:
    """One call of SDPA by `PackedAttention`: n sequences padded to `length`; `queries` < length: a part of each."""

    what: str
    n: int
    queries: int
    length: int


CALLS = {
    "cuda": (
        Call("16 sequences of 512", 16, 512, 512),
        Call("2 sequences of 4000", 2, 4000, 4000),
        Call("the second half of 4 sequences of 2048", 4, 1024, 2048),
    ),
    "cpu": (Call("4 sequences of 16", 4, 16, 16), Call("the second half of 2 sequences of 32", 2, 16, 32)),
}


def attend(inputs: Inputs, call: Call) -> Results:
    """Return the output and the gradients of query, key and value of our module's call."""
    from dppo_megatron.train.actor.local.attention import PackedAttention

    query, key, value, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    seen = visible(call, query.device) if call.queries < call.length else None
    out = PackedAttention.attend(SimpleNamespace(scale=None), *leaves, seen)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def packed(inputs: Inputs, call: Call) -> Results:
    """Return the same by `actor.local.flash`: queries of a part of each sequence continue the rows before it."""
    from dppo_megatron.train.actor.batch.flash import plan_flash
    from dppo_megatron.train.actor.local.flash import FlashAttention

    before = call.length - call.queries
    sizes = torch.tensor([before, call.queries] * call.n)
    starts = sizes.cumsum(0) - sizes
    prefixes = torch.stack((starts.roll(1), sizes.roll(1)), dim=1) * (torch.arange(len(sizes)) % 2)[:, None]
    bounds = F.pad(sizes[sizes > 0].cumsum(0), (1, 0))
    plan = plan_flash(bounds, prefixes[sizes > 0], 0, 1, inputs[0].device)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0, call.length - x.shape[2], 0)).transpose(1, 2).flatten(0, 1)

    leaves = [rows(x).detach().requires_grad_() for x in inputs[:3]]
    out = FlashAttention.apply(*leaves, *leaves[1:], plan, None)
    found = out.detach(), *torch.autograd.grad(out, leaves, rows(inputs[3]))
    likes = (inputs[3], *inputs[:3])
    return tuple(
        x.unflatten(0, (call.n, call.length)).transpose(1, 2)[:, :, -like.shape[2] :]
        for x, like in zip(found, likes, strict=True)
    )


def exactly(inputs: Inputs, call: Call) -> Results:
    """Compute the same in fp32 with the math backend, an explicit mask and one key head for each query head."""
    query, key, value, grad = (x.float() for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    each = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(each, dim=1) for x in leaves[1:])
    with sdpa_kernel([SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=visible(call, query.device))
        return out.detach(), *torch.autograd.grad(out, leaves, grad)


def visible(call: Call, device: torch.device) -> torch.Tensor:
    """[n, 1, queries, length]: the queries are the last ones of their sequence."""
    positions = torch.arange(call.length - call.queries, call.length, device=device).view(1, 1, -1, 1)
    return (positions >= torch.arange(call.length, device=device)).expand(call.n, -1, -1, -1)


def make_inputs(call: Call, model: dict, device: str, dtype: torch.dtype) -> Inputs:
    """Random inputs in the module's memory layout: [n, heads, tokens, d], transposed views of [n, tokens, heads, d]."""
    generator = torch.Generator(device=device).manual_seed(5)
    heads, groups, d = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]

    def normal(tokens: int, count: int) -> torch.Tensor:
        shape = (call.n, tokens, count, d)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype).transpose(1, 2)

    return (
        normal(call.queries, heads),
        normal(call.length, groups),
        normal(call.length, groups),
        normal(call.queries, heads),
    )


def activities(day: Day) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if day.device == "cuda" else [])]


def ran(day: Day, work: Callable[[], object]) -> list[str]:
    """Return the operators of SDPA that ran in `work()` with their number, and on a GPU the kernels."""
    with profile(activities=activities(day)) as seen:
        work()
        day.synchronize()
    counts = {event.key: event.count for event in seen.key_averages()}
    operators = [f"{name} x {count}" for name, count in counts.items() if OPERATOR.match(name)]
    kernels = [name[:90] for name in counts if KERNEL.search(name) and not HOST.search(name)]
    return [*operators, *(f"  kernel {name}" for name in kernels[:8])]


def time_by_kernel(day: Day) -> None:
    """Print which kernels an update runs, how long each takes, and how long the device has nothing to do."""
    from dppo_megatron.objectives import build_objective

    for layers in day.layers:
        with day.actor(model={"layers": layers}) as built:
            batches, objective = day.on_policy(built), build_objective("dppo_binary_tv")
            print(f"{layers}:")
            timed_updates(day, built, batches, objective, 6)
            with profile(activities=activities(day), acc_events=True) as seen:
                started = time.perf_counter()
                built.train_update(batches, objective)
                day.synchronize()
                seconds = time.perf_counter() - started
        events = seen.key_averages()
        host = sorted((e for e in events if e.device_type == DeviceType.CPU), key=lambda e: -e.self_cpu_time_total)
        ranges = {e.key for e in host}  # named ranges are listed for the device too
        kernels = [e for e in events if e.device_type == DeviceType.CUDA and e.key not in ranges]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in kernels) / 1e6
        print(
            f"  profiled update {seconds:.3f} s; kernels {busy:.3f} s in {sum(e.count for e in kernels)} launches; "
            f"{100 * (1 - busy / seconds):.0f} % of the time without a kernel"
        )
        for event in kernels[:24]:
            print(f"  {event.self_device_time_total / 1e3:9.2f} ms {event.count:6d} x  {event.key[:100]}")
        print("  host:")
        for event in host[:12]:
            print(f"  {event.self_cpu_time_total / 1e3:9.2f} ms {event.count:6d} x  {event.key[:100]}")


def in_training(day: Day) -> None:
    from dppo_megatron.objectives import build_objective

    with day.actor(model={"layers": "local"}) as built:
        batches = day.batches()[:1]  # one micro-batch
        print("an update of the model (local layers, bf16):")
        for line in ran(day, lambda: built.train_update(batches, build_objective("dppo_binary_tv"))):
            print(f"  {line}")


def distance(some: Results, exact: Results) -> float:
    """Return the largest difference of output and gradients, each divided by its norm."""
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(some, exact, strict=True))


def by_itself(day: Day, call: Call, dtype: torch.dtype, problems: Problems) -> None:
    inputs = make_inputs(call, day.size.model, day.device, dtype)
    exact = exactly(inputs, call)
    chosen = [line for line in ran(day, lambda: attend(inputs, call)) if not line.startswith("  kernel")]
    name = str(dtype).removeprefix("torch.")
    print(f"{call.what}, {name}: torch chose {', '.join(chosen) or 'nothing that the profiler names'}")
    for backend, kind in {**BACKENDS, "actor.flash": None}.items():
        work = packed if kind is None else attend
        try:
            with sdpa_kernel([kind or SDPBackend.MATH]):
                found = work(inputs, call)
                day.synchronize()
                started = time.perf_counter()
                for _ in range(REPEATS):
                    work(inputs, call)
                day.synchronize()
        except RuntimeError as error:
            print(f"  {backend}: not usable: {str(error).splitlines()[0][:100]}")
            continue
        seconds, far = (time.perf_counter() - started) / REPEATS, distance(found, exact)
        print(f"  {backend}: {1e3 * seconds:.3f} ms forward and backward, {far:.2e} from math in fp32", flush=True)
        problems.value(far <= BOUND[dtype], f"{backend}, {call.what}, {name}: {far:.2e}, allowed {BOUND[dtype]:.0e}")


def sdpa(day: Day) -> None:
    problems = Problems()
    in_training(day)
    for dtype in (torch.bfloat16, torch.float32):
        for call in CALLS[day.device]:
            with problems.noted(f"{call.what}, {dtype}"):
                by_itself(day, call, dtype, problems)
    problems.end()


if __name__ == "__main__":
    run((sdpa, time_by_kernel), __doc__)
