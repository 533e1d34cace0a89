"""The extras of setup.py, single and combined, that the package index is asked for."""

COMBINATIONS: tuple[tuple[str, ...], ...] = (
    ("cpu",), ("gpu",), ("te",), ("vllm",), ("sglang",), ("wandb",), ("dev",), ("gpu", "vllm"), ("gpu", "sglang"),
    ("vllm", "sglang"), ("gpu", "vllm", "wandb"),
)  # fmt: skip
