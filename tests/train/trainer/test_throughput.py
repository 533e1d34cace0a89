"""Model FLOPs of a step over its time: throughput/tflops_per_gpu and throughput/mfu."""

import numpy as np
import pytest

from dppo_megatron.common.hardware import hardware, peak_flops
from dppo_megatron.data.micro_batches import Prefixes, computed_pairs
from dppo_megatron.hf.flops import ModelFlops
from dppo_megatron.train.trainer.batches import UpdateBatch
from dppo_megatron.train.trainer.metrics import StepMetrics, Throughput
from tests.support.updates import update_stats

FLOPS = ModelFlops(row=10, pair=2, head_row=5)
FORWARD = 10 * 100 + 2 * 700 + 5 * 60  # of the update below


def record(throughput: Throughput, **parts: float) -> dict[str, float]:
    """Two updates of 100 tokens each, of 60 with loss; 0.75 s forward and backward and 0.25 s optimizer each."""
    step = StepMetrics(throughput)
    for _ in range(2):
        stats = update_stats(tokens=100, loss_tokens=60, forward_backward_s=0.75, optimizer_s=0.25)
        step.add_update(stats, UpdateBatch([], 4, 120, 100, 700))
    step.add({f"time/{name}_s": seconds for name, seconds in parts.items()})
    return step.finish()


def test_flops_of_the_updates_over_their_time_and_the_peak():
    found = record(Throughput(FLOPS, 4, 1e4), wait=100.0, publish=50.0)
    rate = 2 * 3 * FORWARD / 2.0 / 4
    assert found["throughput/tflops_per_gpu"] == pytest.approx(rate / 1e12)
    assert found["throughput/mfu"] == pytest.approx(rate / 1e4)


def test_log_prob_passes_count_one_forward_pass_and_their_time():
    found = record(Throughput(FLOPS, 4, 1e4), recompute=0.5, reference=0.25)
    assert found["throughput/mfu"] == pytest.approx((2 * 3 + 2 * 2) * FORWARD / 2.75 / 4 / 1e4)


def test_an_unknown_peak_gives_no_mfu():
    found = record(Throughput(FLOPS, 1, None))
    assert "throughput/tflops_per_gpu" in found
    assert "throughput/mfu" not in found


def test_a_step_without_updates_has_neither():
    assert not [name for name in StepMetrics(Throughput(FLOPS, 1, 1e4)).finish() if name.startswith("throughput")]


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks_by_the_name_of_the_device(device, dtype, tflops):
    assert peak_flops(device, dtype) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "l40s-48", "h100-80", "h20-96", "h200-141", "b200-192"])
def test_every_gpu_of_the_plan_has_a_peak(name):
    assert peak_flops(hardware(name).name, "bf16") > 1e14


def test_pairs_of_shared_prefixes_are_computed_once():
    """Prompt of 3, responses of 2 and 4 after it; another group's sequence of 6."""
    sizes, prefixes = np.array([5, 7, 6]), Prefixes(np.array([0, 0, 1]), np.array([3, 3, 2]))
    assert computed_pairs([[[0, 1, 2]]], sizes, None) == 15 + 28 + 21
    assert computed_pairs([[[0, 1, 2]]], sizes, prefixes) == 15 + (28 - 6) + 21
    assert computed_pairs([[[0], []], [[1], [2]]], sizes, prefixes) == 15 + 28 + 21  # apart: each computes its prompt
    assert computed_pairs([[[0]]], np.array([100_000], np.int32), None) == 5_000_050_000
