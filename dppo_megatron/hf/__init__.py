"""Maps weights between HF and Megatron. Loading, saving, conversion and weight sync share this map."""

from . import fp8
from .errors import ModelError
from .export import export_weights, save_hf
from .families import FAMILIES, Family
from .hf_config import DeltaNetConfig, HFModelConfig, MLAConfig, MoEConfig
from .load import load_into
from .megatron_model import ParallelRanks, ShardGroup
from .parse_config import parse_hf_config, read_hf_config
from .random_init import make_random_hf_model
from .rope import inverse_frequencies
from .rules import Entry, HFTensor, MegatronLayout, padded_vocab_size
from .safetensors_reader import SafetensorsDirectory
from .safetensors_writer import PartWriter
from .weight_map import WeightMap
from .weight_source import WeightSource, header_problems, open_weights

__all__ = [
    "FAMILIES",
    "DeltaNetConfig",
    "Entry",
    "Family",
    "HFModelConfig",
    "HFTensor",
    "MLAConfig",
    "MegatronLayout",
    "MoEConfig",
    "ModelError",
    "ParallelRanks",
    "PartWriter",
    "SafetensorsDirectory",
    "ShardGroup",
    "WeightMap",
    "WeightSource",
    "export_weights",
    "fp8",
    "header_problems",
    "inverse_frequencies",
    "load_into",
    "make_random_hf_model",
    "open_weights",
    "padded_vocab_size",
    "parse_hf_config",
    "read_hf_config",
    "save_hf",
]
