"""Makes records as a trainer writes them."""


def step_record(step: int, time: float, **changes: float | None) -> dict:
    return {
        "step": step,
        "time": time,
        "train/loss": 0.001,
        "train/grad_norm": 0.5,
        "policy/masked_share": 0.004,
        "policy/masked_share_positive": 0.002,
        "policy/masked_share_negative": 0.006,
        "mismatch/kl": 2e-9,
        "mismatch/max_abs_logprob_difference": 1e-5,
        "rollout/reward_mean": 0.3 + 0.02 * step,
        "time/step_s": 2.0,
        "time/wait_s": 1.0,
        "time/forward_backward_s": 0.5,
        "time/publish_s": 0.3,
        "throughput/tokens_per_s": 1500.0,
    } | changes
