"""The call that a heartbeat names: the collective, and the line of Megatron or of the package that issued it."""

import threading

from dppo_megatron.common import heartbeat

TORCH = "/site-packages/torch/distributed/distributed_c10d.py"


def call_of(*frames: tuple[str, str]) -> tuple[str, bool]:
    """Return the call that is named in a stack of functions (file, name), the outermost first."""
    found = []
    inner = lambda: found.append(heartbeat._call_of(threading.get_ident()))  # noqa: E731
    for path, name in reversed(frames):
        scope = {"inner": inner}
        exec(compile(f"def {name}():\n    return inner()\n", path, "exec"), scope)
        inner = scope[name]
    inner()
    return found[0]


def test_a_collective_of_megatron():
    stack = ("/site-packages/megatron/core/ddp.py", "start_grad_sync"), ("/lib/contextlib.py", "__exit__")
    assert call_of(*stack, (TORCH, "_coalescing_manager")) == (
        "_coalescing_manager (megatron/core/ddp.py, line 2)",
        True,
    )


def test_the_called_function_is_named_not_those_inside():
    stack = ("/site/megatron/core/optimizer.py", "groups"), (TORCH, "all_gather_object"), (TORCH, "all_gather")
    assert call_of(*stack, (TORCH, "_wait")) == ("all_gather_object (megatron/core/optimizer.py, line 2)", True)


def test_an_agreement_of_the_ranks():
    ranks = "/x/dppo_megatron/common/ranks.py"
    stack = ("/x/dppo_megatron/train/trainer/control.py", "barrier"), (ranks, "gather"), (ranks, "_wait")
    assert call_of(*stack) == ("gather (dppo_megatron/train/trainer/control.py, line 2)", True)


def test_work_that_waits_for_no_other_rank():
    stack = ("/x/dppo_megatron/train/actor/forward.py", "run_model"), ("/site/torch/nn/linear.py", "forward")
    assert call_of(*stack) == ("run_model (dppo_megatron/train/actor/forward.py, line 2)", False)
