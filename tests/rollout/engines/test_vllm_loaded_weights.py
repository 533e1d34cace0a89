"""The fingerprint of a vLLM worker that changes or packs its layers after loading them."""

import pytest
import torch

from dppo_megatron.rollout.engines.vllm.extension.loaded_weights import LoadedWeights
from dppo_megatron.weights.fingerprint import join_workers, sum_of

OLD, NEW = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
PROJ = sum_of("layers.0.proj.weight", NEW)
EMBEDDED = {version: sum_of("embed_tokens.weight", weight) for version, weight in (("old", OLD), ("new", NEW))}


class Method:
    """Processes weights as vLLM does: `negates` the ones for computing, or `packs` them where they cannot be read."""

    def __init__(self, how: str):
        self.how = how

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.how == "negates":
            layer.weight.data = -layer.weight.data
        if self.how == "packs":
            packed = layer.weight.data.clone()
            layer.cpu_linear = lambda x: x @ packed.T
            if type(layer).__name__ == "ColumnParallelLinear":
                layer.weight = torch.nn.Parameter(torch.empty(0))


ColumnParallelLinear = type("ColumnParallelLinear", (torch.nn.Module,), {})
VocabParallelEmbedding = type("VocabParallelEmbedding", (torch.nn.Module,), {})
ParallelLMHead = type("ParallelLMHead", (VocabParallelEmbedding,), {})


def layer(kind: type[torch.nn.Module], how: str) -> torch.nn.Module:
    made = kind()
    made.quant_method = Method(how)
    load(made, OLD)
    return made


def load(module: torch.nn.Module, weight: torch.Tensor) -> None:
    module.weight = torch.nn.Parameter(weight.clone())


def update(held: LoadedWeights, module: torch.nn.Module) -> None:
    held.follow()
    load(module, NEW)
    module.quant_method.process_weights_after_loading(module)


def fingerprint(held: LoadedWeights) -> dict[str, int]:
    return join_workers([held.shares()])[0]


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Module()


@pytest.mark.parametrize("how", ["leaves", "negates", "packs"])
def test_processed_weights_have_the_fingerprint_of_the_loaded_ones(model, how):
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].proj = layer(ColumnParallelLinear, how)
    held = LoadedWeights(model)
    update(held, model.layers[0].proj)
    assert fingerprint(held) == {"layer 0": PROJ}


@pytest.mark.parametrize("how", ["leaves", "negates"])
def test_a_kernel_that_kept_the_old_weights_shows(model, how):
    """The layer was loaded and processed, but computes with its old weights."""
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    proj = model.layers[0].proj = layer(ColumnParallelLinear, how)
    held = LoadedWeights(model)
    update(held, proj)
    proj.weight.data = -OLD if how == "negates" else OLD
    assert fingerprint(held)["layer 0"] != PROJ


@pytest.mark.parametrize("packed_before", [False, True])
def test_a_stale_packed_copy_changes_the_fingerprint(model, packed_before):
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    proj = model.layers[0].proj = layer(ColumnParallelLinear, "packs")
    held = LoadedWeights(model)
    if packed_before:
        held.follow()
    proj.quant_method.process_weights_after_loading(proj)  # at the start, and never again
    assert fingerprint(held).get("layer 0") != PROJ


def test_a_packed_head_that_is_tied_must_follow_the_embedding(model):
    model.embed_tokens, model.lm_head = layer(VocabParallelEmbedding, "leaves"), layer(ParallelLMHead, "packs")
    held = LoadedWeights(model)
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)  # at the start
    assert fingerprint(held)["lm_head"] not in EMBEDDED.values(), "nobody saw what it was made from"
    held.follow()
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    update(held, model.embed_tokens)
    model.lm_head.weight = model.embed_tokens.weight
    assert fingerprint(held) == {"embed_tokens": EMBEDDED["new"], "lm_head": EMBEDDED["old"]}, "its copy is stale"
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    assert fingerprint(held) == {"embed_tokens": EMBEDDED["new"], "lm_head": EMBEDDED["new"]}
