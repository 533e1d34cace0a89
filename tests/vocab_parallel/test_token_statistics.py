"""token_statistics in one process: reference, gradcheck, edge cases, memory, compiled path."""

import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from dppo_megatron.vocab_parallel import compiled, token_statistics, torch_backend
from tests.support.shards import Largest, shard_case
from tests.support.statistics_reference import Case, assert_close_to_reference, cases, make_inputs, reference

ROOT = Path(__file__).resolve().parents[2]
BASE = Case(seed=5, tokens=9, columns=(30,), vocab=27, topk=5)


def check(case: Case, **options: Any) -> None:
    result = shard_case(case, 0, **options)
    assert_close_to_reference(case, reference(case, make_inputs(case)), result["values"], result["gradient"])
    assert not result["nonfinite"].any()
    assert result["forward"] == result["backward"] == {}


@given(case=cases())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_cases(case: Case) -> None:
    check(case)


def test_int32_ids() -> None:
    inputs = make_inputs(BASE)
    wide = token_statistics(inputs.logits, inputs.target, inputs.topk, BASE.vocab)
    narrow = token_statistics(inputs.logits, inputs.target.int(), inputs.topk.int(), BASE.vocab)
    assert torch.equal(wide.topk_logprob, narrow.topk_logprob)


def test_the_documented_divergence_as_printed() -> None:
    """The KL over the outcomes and its gradient, with the sampled token in the list and not, absent ids, no rest."""
    text = (ROOT / "docs" / "vocab_parallel.md").read_text()
    recipe = text.split("### A top-K divergence as a loss")[1].split("```python\n")[1].split("```")[0]
    generator = torch.Generator().manual_seed(1)
    mu, pi = (torch.randn(5, 7, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    topk_ids = torch.tensor([[0, 1, 2], [3, 4, -1], [5, -1, 0], [-1, -1, -1], [6, 2, 1]])
    target_ids = torch.tensor([1, 0, 6, 3, 6])
    for policy in (mu, pi):
        logits = policy.clone().requires_grad_()
        names = {
            "torch": torch,
            "topk_ids": topk_ids,
            "target_ids": target_ids,
            "rollout_logprob": mu.gather(1, target_ids[:, None])[:, 0],
            "rollout_topk_logprob": mu.gather(1, topk_ids.clamp(min=0)).masked_fill(topk_ids < 0, -torch.inf),
            "stats": token_statistics(logits, target_ids, topk_ids),
        }
        exec(recipe, names)
        plain = policy.clone().requires_grad_()
        expected = []
        for row, (target, ids) in enumerate(zip(target_ids.tolist(), topk_ids.tolist(), strict=True)):
            own = sorted({target, *(i for i in ids if i >= 0)})
            rest = [i for i in range(7) if i not in own]
            p, q = mu[row].exp(), plain[row].softmax(0)
            merged = [torch.cat([x[own], x[rest].sum()[None]]) for x in (p, q)]
            expected.append((merged[0] * (merged[0].log() - merged[1].log())).sum())
        torch.testing.assert_close(names["kl"], torch.stack(expected))
        wanted = torch.autograd.grad(sum(expected), plain)[0]
        torch.testing.assert_close(torch.autograd.grad(names["kl"].sum(), logits)[0], wanted)

    everything = token_statistics(pi.clone().requires_grad_(), target_ids, torch.arange(7).expand(5, 7))
    names |= {"stats": everything, "topk_ids": torch.arange(7).expand(5, 7), "rollout_topk_logprob": mu}
    exec(recipe, names)
    torch.testing.assert_close(names["kl"].detach(), (mu.exp() * (mu - pi)).sum(1))


# --- numerics ---


def test_p_near_one_keeps_its_gradient() -> None:
    # 1 - p = 1e-3: subtracting a rounded p from 1 in bf16 would give 0, in fp32 an error of 6e-5.
    rest = torch.full((1, 64), 0.0)
    rest[0, 5] = torch.tensor(63 * 999.0).log()
    for dtype, allowed in ((torch.float32, 2e-7), (torch.bfloat16, 2.0**-8)):
        leaf = rest.detach().clone().to(dtype).requires_grad_()
        token_statistics(leaf, torch.tensor([5])).logprob.sum().backward()
        p = torch.softmax(leaf.detach().double(), dim=1)[0, 5]
        assert abs(leaf.grad[0, 5].double() / (1 - p) - 1) < allowed


def test_tail_mass_far_below_fp32() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 3] = 400.0
    logits.requires_grad_()
    stats = token_statistics(logits, torch.tensor([3, 3]), torch.tensor([[3], [3]]))
    expected = torch.tensor(49.0).log() - 400.0
    assert torch.allclose(stats.other_logprob, expected.expand(2), rtol=1e-7)
    stats.other_logprob.sum().backward()
    wanted = torch.full((50,), 1 / 49)
    wanted[3] = -1.0
    assert torch.allclose(logits.grad[0], wanted, rtol=1e-6)


def test_large_logits_keep_their_low_bits() -> None:
    # lse = max + ln S would round to the spacing of numbers near 3000.
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)) + 3000.0
    stats = token_statistics(logits, torch.arange(16), temperature=0.9)
    wanted = torch.log_softmax(logits.double() / 0.9, dim=1)
    assert (stats.logprob - wanted[torch.arange(16), torch.arange(16)]).abs().max() < 2e-6
    assert (stats.entropy + (wanted.exp() * wanted).sum(1)).abs().max() < 2e-6


# --- rows that are not finite ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("entropy", ["none", "differentiable"])
@pytest.mark.parametrize("column", [0, 4, 9])  # the target, a top-K id, another column
def test_nonfinite_rows_are_named_and_affect_no_other(bad: float, entropy: str, column: int) -> None:
    clean = torch.randn(4, 12, generator=torch.Generator().manual_seed(2))
    target, topk = torch.tensor([0, 0, 0, 0]), torch.tensor([[4, 5]] * 4)
    gradients, results = [], []
    for corrupt in (False, True):
        logits = clean.clone()
        if corrupt:
            logits[2, column] = bad
        logits.requires_grad_()
        stats = token_statistics(logits, target, topk, 11, entropy=entropy)
        (stats.logprob + stats.topk_logprob.sum(1) + stats.other_logprob).sum().backward()
        gradients.append(logits.grad)
        results.append(stats)
    assert results[0].nonfinite_rows() == []
    assert results[1].nonfinite_rows() == [2]
    with pytest.raises(FloatingPointError, match="1 of 4 rows: 2"):
        results[1].raise_if_nonfinite()
    others = [0, 1, 3]
    assert torch.equal(gradients[1][others], gradients[0][others])
    assert torch.equal(results[1].logprob[others], results[0].logprob[others])
    assert (gradients[1][2] == 0).all()


def test_minus_infinity_is_probability_zero() -> None:
    case = replace(BASE, vocab=None)
    inputs = make_inputs(case)
    hidden = inputs.logits.clone()
    free = [c for c in range(30) if c not in {*inputs.target.tolist(), *inputs.topk.flatten().tolist()}][:2]
    hidden[:, free] = float("-inf")
    lowest = inputs.logits.clone()
    lowest[:, free] = -1e4
    gradients = []
    for logits in (hidden.requires_grad_(), lowest.requires_grad_()):
        stats = token_statistics(logits, inputs.target, inputs.topk, entropy="differentiable")
        assert not stats.nonfinite.any()
        (stats.logprob + stats.entropy + stats.other_logprob).sum().backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
    assert (gradients[0][:, free] == 0).all()
    at_target = hidden.detach().clone()
    at_target[1, inputs.target[1]] = float("-inf")
    assert token_statistics(at_target, inputs.target).nonfinite_rows() == [1]


# --- storage ---


def test_gradient_replaces_the_logits() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)
    logits = leaf * 1.0
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    before = logits.detach().clone()
    stats = token_statistics(logits, torch.tensor([1, 2, 3]))
    assert torch.equal(logits, before)
    stats.logprob.sum().backward()
    assert seen == [logits.data_ptr()]


@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_keeps_its_values(view: bool) -> None:
    leaf = torch.randn(1, 3, 8) if view else torch.randn(3, 8)
    before = leaf.clone()
    leaf.requires_grad_()
    for _ in range(2):
        token_statistics(leaf.view(3, 8) if view else leaf, torch.tensor([1, 2, 3])).logprob.sum().backward()
    assert torch.equal(leaf, before)


def test_consumed_logits_cannot_be_used_again() -> None:
    logits = torch.randn(3, 8, requires_grad=True) * 1.0
    target = torch.tensor([1, 2, 3])
    first, second = token_statistics(logits, target), token_statistics(logits, target)
    first.logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.logprob.sum().backward()
    kept = torch.randn(3, 8, requires_grad=True) * 1.0
    first, second = (token_statistics(kept, target, inplace=False) for _ in range(2))
    first.logprob.sum().backward(retain_graph=True)
    second.logprob.sum().backward()


def test_expanded_logits_are_not_written() -> None:
    row = torch.randn(1, 8, requires_grad=True)
    stats = token_statistics((row * 1.0).expand(3, 8), torch.tensor([1, 2, 2]), torch.tensor([[1], [1], [3]]))
    stats.logprob.sum().backward()
    again = row.detach().clone().requires_grad_()
    torch.log_softmax(again.expand(3, 8), dim=1)[torch.arange(3), torch.tensor([1, 2, 2])].sum().backward()
    assert torch.allclose(row.grad, again.grad, atol=1e-6)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        logits = torch.randn(3, 8)
    assert torch.isfinite(token_statistics(logits, torch.tensor([1, 2, 3])).logprob).all()


def test_eager_allocates_a_fraction_of_the_logits() -> None:
    leaf = torch.randn(1024, 4096, dtype=torch.bfloat16, requires_grad=True)
    logits = leaf * 1.0
    target, topk = torch.randint(0, 4096, (1024,)), torch.randint(0, 4096, (1024, 20))
    with Largest() as forward:
        loss = token_statistics(logits, target, topk).logprob.sum()
    assert forward.nbytes <= 0.15 * logits.numel()
    with Largest() as backward:
        (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert backward.nbytes <= 0.15 * logits.numel()


# --- compiled ---


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@pytest.mark.slow
def test_compiled_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_WORTHWHILE", 0)
    monkeypatch.setattr(torch_backend, "_COMPILED_CPU", 200)  # several pieces
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # raised where compiling fails
        check(BASE, count=False)
        check(replace(BASE, seed=6, tokens=13, temperature="tensor", peaked=True), count=False)
        # Inductor's own sum over so many columns errs by 4e-6.
        check(Case(seed=3, tokens=3, columns=(150_001,), vocab=150_000, topk=8), count=False)
        logits = torch.randn(4, 12)
        logits[2, 9] = float("nan")
        logits.requires_grad_()
        stats = token_statistics(logits, torch.zeros(4, dtype=torch.int64), entropy="differentiable")
        stats.entropy.sum().backward()
    assert stats.nonfinite_rows() == [2]
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[2] == 0).all()


def test_falls_back_where_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled, "_WORTHWHILE", 0)
    monkeypatch.setattr(torch, "compile", broken)
    for name in ("_compiled_sums_with_entropy", "_compiled_gradient_with_entropy"):
        function = getattr(torch_backend, name)._function
        monkeypatch.setattr(torch_backend, name, compiled.CompiledOrEager(function))
    with pytest.warns(RuntimeWarning, match="no compiler"):
        check(BASE)


# --- rows without loss ---


def test_rows_without_loss_may_hold_anything():
    """A row without loss may have target -100, any ids, temperature 0 or nan logits: it gives 0 and no gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    target, topk = torch.arange(6), torch.arange(12).view(6, 2) % 9
    keep = torch.tensor([True, False, True, False, False, True])
    temperature = torch.full((6,), 1.3)
    dirty = torch.where(keep[:, None], logits, torch.nan).requires_grad_()
    masked = token_statistics(
        dirty,
        torch.where(keep, target, -100),
        torch.where(keep[:, None], topk, 99),
        temperature=torch.where(keep, temperature, 0.0),
        entropy="differentiable",
        loss_mask=keep,
    )
    clean = logits[keep].requires_grad_()
    alone = token_statistics(clean, target[keep], topk[keep], temperature=temperature[keep], entropy="differentiable")
    for name in ("logprob", "entropy", "topk_logprob", "other_logprob"):
        assert torch.equal(getattr(masked, name)[keep], getattr(alone, name)), name
        assert not getattr(masked, name)[~keep].any(), name
    assert not masked.nonfinite.any()
    for stats in (masked, alone):
        (stats.logprob.sum() + stats.entropy.sum() + stats.topk_logprob.sum() + stats.other_logprob.sum()).backward()
    assert torch.equal(dirty.grad[keep], clean.grad)
    assert not dirty.grad[~keep].any()
    with pytest.raises(ValueError, match=r"target_ids must be within"):
        token_statistics(logits, torch.where(keep, target, -100))
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        token_statistics(logits, target, loss_mask=torch.ones(6))


# --- arguments ---


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, ValueError, r"logits must be \[T, V_local\], got shape \[2, 3, 4\]"),
        ({"logits": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "logits must be bf16"),
        ({"logits": [1.0]}, TypeError, "logits must be a tensor"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "no columns"),
        ({"target_ids": torch.zeros(4, dtype=torch.int64)}, ValueError, r"target_ids must be \[T\] with T = 3"),
        ({"target_ids": torch.zeros(3)}, TypeError, "target_ids must be int32 or int64, got torch.float32"),
        ({"topk_ids": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, r"topk_ids must be \[T, K\] with T = 3"),
        ({"vocab_size": 9}, ValueError, r"1 shard\(s\) of 8 columns make 8, fewer than vocab_size=9"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be a positive int"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature must be a float or \[T\] with T = 3"),
        ({"entropy": "yes"}, ValueError, "entropy must be one of"),
        ({"group": 2}, TypeError, "group must be a process group of torch.distributed or None, got 2"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
        ({"vocab_start": 4}, ValueError, "must start at column 0"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": torch.zeros(3, 8), "target_ids": torch.tensor([0, 1, 2])} | changes
    with pytest.raises(error, match=message):
        token_statistics(**arguments)


def test_metric_entropy_has_no_gradient() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    stats = token_statistics(logits, torch.tensor([0, 1, 2]))
    assert not stats.entropy.requires_grad
    assert not stats.nonfinite.requires_grad
    assert token_statistics(logits, torch.tensor([0, 1, 2]), entropy="none").entropy is None


def test_vocab_parallel_imports_with_only_torch() -> None:
    blocked = ("triton", "jaxtyping", "megatron", "numpy", "vllm", "transformers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from dppo_megatron.vocab_parallel import token_statistics, linear_token_statistics\n"
        "stats = token_statistics(torch.zeros(2, 4), torch.tensor([0, 1]))\n"
        "assert abs(stats.entropy[0] - torch.tensor(4.0).log()) < 1e-6"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd="/")
