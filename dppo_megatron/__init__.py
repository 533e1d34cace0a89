"""Reinforcement learning for language models on Megatron-core with divergence trust regions (DPPO, DRPO)."""


def __getattr__(name: str) -> str:
    """Return `__version__` from the metadata of the installed package."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("dppo_megatron")
