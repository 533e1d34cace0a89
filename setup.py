"""Requirements, each with its reason. The other metadata is in pyproject.toml.

`pip install .` needs only torch and gives `objectives` and `vocab_parallel`.
"""

from setuptools import setup

# Requirements of the trainer on every machine.
TRAIN = [
    "numpy>=2",
    "pydantic>=2.10",  # typed config
    "pyyaml>=6",  # config files
    "typer>=0.19",  # commands
    "rich>=13.9",  # progress and tables
    "aiohttp>=3.10",  # engine HTTP clients, the gateway that agents talk to
    "certifi",  # certificates of engines behind https
    "tenacity>=9",  # retries with back-off: common/retry.py
    "psutil>=6",  # process supervision; megatron-core's checkpoint writer needs it undeclared
    "safetensors>=0.5",  # weights and rollouts on disk
    "tokenizers>=0.21",
    "transformers>=5",  # tokenizers and HF configs
    "jinja2>=3.1",  # chat templates, batch scripts
    "math-verify==0.9.0",  # GSM8K and MATH answers
    "pyarrow>=20",  # parquet and Hugging Face dataset directories
    "matplotlib>=3.9",  # curves of the report
    "tensorboard>=2.19",
    "megatron-core>=0.16.1,<0.20",  # releases that train/actor/megatron_version.py knows
]

setup(
    install_requires=["torch>=2.6"],
    extras_require={
        "cpu": TRAIN,
        "gpu": TRAIN,  # only wheels: without TransformerEngine and apex `model.layers: local` trains
        "te": ["transformer-engine[pytorch]>=2.0"],  # source only: containers/install.sh --with-te, docs/install.md
        # vllm and sglang exclude each other (xgrammar 0.2.8 and 0.2.7). Each needs its own environment; engine.python
        # names the second one.
        "vllm": ["vllm>=0.32,<0.33"],  # 0.33 rejects requests that arrive during a pause; CI runs 0.32
        "sglang": ["sglang>=0.5.23,<0.5.24"],  # our plugin overrides internals of 0.5.23
        "wandb": ["wandb>=0.31"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",  # two processes, because tests often wait
            "hypothesis>=6.100",
            "httpx>=0.28",
            "peft>=0.17",  # must load our saved adapters
            "ruff>=0.9",
            "import-linter>=2.17",  # layers of imports: pyproject.toml
            "uv>=0.13",  # resolves the locks of GPU machines: tools/gpu_locks.py
            "mypy>=2.4",  # types of the public surface (make lint)
            "types-PyYAML",
            "jaxtyping>=0.3",
        ],
    },
)
