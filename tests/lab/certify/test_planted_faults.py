"""Three faults in one engine: the certificate names the layers of each, and none that only inherits a difference."""

import json
import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from dppo_megatron.convert.job import ConversionWorker, convert
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.lab.certify.certificate_text import exceeds, text
from dppo_megatron.lab.certify.command import certify
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import engine_config, make_model, running_server

LAYERS, STALE = range(4), 2
NORMS = {f"layer {n} {name}" for n in LAYERS for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")}
ROTATED = {f"layer {n} {name}" for n in LAYERS for name in ("q_rotated", "k_rotated")}
LINEAR = ("q_projection", "k_projection", "v_projection", "attention_projection", "mlp_gate", "mlp_up", "mlp")

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def faulty_copy(model, older, directory):
    """Another norm epsilon, another rotary base, and one layer with the weights of another version."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    config.setdefault("rope_parameters", {})["rope_theta"] = config["rope_theta"] = 5000.0
    (directory / "config.json").write_text(json.dumps(config))
    weights, stale = (load_file(path / "model.safetensors") for path in (directory, older))
    weights |= {name: value for name, value in stale.items() if f"layers.{STALE}." in name}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Certificates of the engine at its start, after a publish of a run's weights, and of the rounded start model."""
    root = tmp_path_factory.mktemp("certify") / "models"
    model, older = (make_model(root / name, seed) for name, seed in (("a", 1), ("b", 2)))
    served = engine_config(faulty_copy(model, older, root / "faulty"))
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"12+{n}=", "answer": "1"}) + "\n" for n in "345")
    )
    config = with_settings(
        engine_config(model),
        run={"dir": root / "run"},
        data={"train": root / "prompts.jsonl"},
        engine={"secret_file": root / "secret"},
        weight_sync={"probe_tolerance": 100.0},
    )
    checkpoint = root / "trained" / "checkpoints"
    convert(partial(ToMegatron, model, checkpoint, TargetLayout()), worker=ConversionWorker())
    with running_server(served, root / "server.log", version=0) as url:
        before = certify(config, "config.yaml", prompts=3, urls=[url])[1]
        after = certify(config, "config.yaml", prompts=3, urls=[url], run=root / "trained")[1]
        rounded = with_settings(config, engine={"quantization": "fp8_block_emulated"})
        return before, after, certify(rounded, "config.yaml", prompts=3, urls=[url])[1]


@pytest.fixture
def certificate(certificates):
    return certificates[0]


def test_the_norm_epsilon_is_named_first(certificate):
    assert certificate["first_beyond_rounding"] == "layer 0 input_norm"


def test_the_rotary_base_is_named_in_every_layer(certificate):
    assert set(certificate["beyond_rounding"]) >= ROTATED


def test_the_stale_layer_is_named_and_no_other(certificate):
    others = set(certificate["beyond_rounding"]) - NORMS - ROTATED - {"final_norm"}
    assert others == {f"layer {STALE} {name}" for name in LINEAR}


def test_published_weights_are_not_stale_and_the_rest_stays(certificates):
    before, after = (set(certificate["beyond_rounding"]) for certificate in certificates[:2])
    assert before - after == {f"layer {STALE} {name}" for name in LINEAR}
    assert after >= ROTATED | {"layer 0 input_norm"}
    assert "published by shared_storage" in certificates[1]["weights"]


def test_the_published_weights_of_a_certificate_are_rounded_as_in_the_run(certificates):
    rounded = certificates[2]
    assert rounded["weights"].endswith("published by shared_storage, rounded to FP8")
    projections = {f"layer {n} {name}" for n in LAYERS for name in LINEAR}
    assert set(rounded["beyond_rounding"]) >= projections
    assert "logits" not in rounded["beyond_rounding"]  # the head is not rounded


def test_the_report_names_the_operators_that_differ(certificate):
    said = text(certificate)
    assert "layer 0 input_norm" in said
    assert f"layer {STALE} v_projection" in said
    assert exceeds(certificate, 1e-2)
