"""Every damage of a model directory is found before a run starts, by the file's name, in one clear error."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dppo_megatron.config import Config, ConfigError, with_settings
from dppo_megatron.errors import LONGEST_MESSAGE
from dppo_megatron.hf import make_random_hf_model
from dppo_megatron.run.checks import preflight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sound model, with its weights in one file and in several."""
    from make_task import write_random_model

    root = tmp_path_factory.mktemp("whole")
    write_random_model(root / "single", seed=1)
    model = json.loads((root / "single" / "config.json").read_text())
    make_random_hf_model(root / "weights", model, seed=1, shard_bytes=60_000)
    shutil.copytree(root / "single", root / "sharded", ignore=shutil.ignore_patterns(SINGLE))
    shutil.copytree(root / "weights", root / "sharded", dirs_exist_ok=True)
    (root / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return root


def config(whole: Path, model: Path, tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": str(whole / "prompts.jsonl"), "max_prompt_tokens": 16},
            "train": {"steps": 1},
            "rollout": {"max_response_tokens": 4},
            "engine": {"max_model_len": 64, "urls": ["http://127.0.0.1:9"]},
        }
    )


def problems(whole: Path, model: Path, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        preflight(config(whole, model, tmp_path), "config.yaml", place="node")
    assert len(str(raised.value).encode()) <= LONGEST_MESSAGE
    return str(raised.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_sound_model_is_accepted(whole, kind, tmp_path):
    preflight(config(whole, whole / kind, tmp_path), "config.yaml", place="node")


def test_a_run_in_place_of_its_checkpoint_is_named(whole, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    given = with_settings(config(whole, whole / "single", tmp_path), model={"weights": tmp_path})
    with pytest.raises(ConfigError, match=f"model.weights = {tmp_path}: a run; name RUN/checkpoints/step-N$"):
        preflight(given, "config.yaml", place="node")


def with_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """The weights with another header before the same bytes."""

    def damage(model: Path) -> None:
        file = model / SINGLE
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return damage


def of_tensor(change: Callable[[dict], object], name: str = "model.norm.weight") -> Callable[[Path], None]:
    return with_header(lambda header: change(header[name]))


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


IN_ONE_FILE = {
    "absent": lambda model: (model / SINGLE).unlink(),
    "a directory": lambda model: ((model / SINGLE).unlink(), (model / SINGLE).mkdir()),
    "four bytes": rewrite(SINGLE, lambda content: content[:4]),
    "one byte short": rewrite(SINGLE, lambda content: content[:-1]),
    "half": rewrite(SINGLE, lambda content: content[: len(content) // 2]),
    "a pointer": rewrite(SINGLE, lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "a page": rewrite(SINGLE, lambda content: b"<!DOCTYPE html><html>403</html>"),
    "header not JSON": rewrite(SINGLE, lambda content: content[:8] + b"[" + content[9:]),
    "another size": of_tensor(lambda tensor: tensor["shape"].append(2)),
    "unknown type": of_tensor(lambda tensor: tensor.update(dtype="F4")),
    "another shape": of_tensor(lambda tensor: tensor.update(shape=[2, tensor["shape"][0] // 2])),
    "a transposed matrix": of_tensor(lambda tensor: tensor["shape"].reverse(), "model.layers.0.mlp.up_proj.weight"),
    "another name": with_header(lambda header: header.update(other=header.pop("model.norm.weight"))),
    "no tensors": with_header(dict.clear),
}


MESSAGES = {
    "absent": "no weights to read; `hf download NAME --local-dir DIR` fetches them, `dppo-megatron convert ",
    "half": "not a safetensors file, or truncated (1673624 bytes)",
    "four bytes": "header too small",
    "a page": "not a safetensors file",
    "a pointer": "model.safetensors: a Git LFS pointer, not the file; `git lfs pull`",
    "header not JSON": "invalid JSON in header",
    "another size": "invalid shape, data type, or offset for tensor",
    "absent shard": "model-00002-of-00028.safetensors: absent, the index places 1 tensors there",
    "a missing tensor named": "model.ghost: the index places it in model-00028-of-00028.safetensors, which lacks it",
    "index a list": "not a valid index: the top level must be an object",
}


def shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[1]


def in_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        content = json.loads((model / name).read_text())
        change(content)
        (model / name).write_text(json.dumps(content))

    return damage


def entries(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return in_json(INDEX, lambda index: change(index["weight_map"]))


IN_SHARDS = {
    "absent shard": lambda model: shard(model).unlink(),
    "another shard's bytes": lambda model: shutil.copy(sorted(model.glob("*.safetensors"))[0], shard(model)),
    "absent index": lambda model: (model / INDEX).unlink(),
    "index of no tensors": entries(dict.clear),
    "index a list": lambda model: (model / INDEX).write_text("[]"),
    "map a list": in_json(INDEX, lambda index: index.update(weight_map=list(index["weight_map"]))),
    "a missing tensor named": entries(lambda names: names.update({"model.ghost": next(iter(names.values()))})),
    "a tensor not named": entries(lambda names: names.pop("model.norm.weight")),
    "a tensor in the wrong file": entries(
        lambda names: names.update(
            {"model.norm.weight": next(f for f in names.values() if f != names["model.norm.weight"])}
        )
    ),
    "a file that is a number": entries(lambda names: names.update({"model.norm.weight": 3})),
    "a file elsewhere": entries(lambda names: names.update({"model.norm.weight": "../single/model.safetensors"})),
    "a file that is a directory": entries(lambda names: names.update({"model.norm.weight": "."})),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("single", n) for n in IN_ONE_FILE), *(("sharded", n) for n in IN_SHARDS)]
)
def test_damaged_weights_are_refused_by_name(whole, kind, name, tmp_path):
    model = shutil.copytree(whole / kind, tmp_path / "model")
    (IN_ONE_FILE | IN_SHARDS)[name](model)
    found = problems(whole, model, tmp_path)
    assert f"model.path = {model}: " in found
    assert MESSAGES.get(name, "") in found
    named = (INDEX, "model-0", "model.ghost") if kind == "sharded" else (SINGLE, "up_proj.weight")
    assert any(part in found for part in (*named, "model.norm.weight"))


def keys(**values) -> Callable[[Path], None]:
    return in_json("config.json", lambda settings: settings.update(values))


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())


OTHER_FILES = {
    "config not UTF-8": (text("config.json", b'{"a": "\xff"}'), "config.json: not UTF-8"),
    "config a list": (text("config.json", "[]"), "the top level must be an object"),
    "config nested": (text("config.json", "[" * 200_000), "nested too deeply"),
    "config cut": (text("config.json", '{"a": '), "config.json: not valid JSON"),
    "config a long number": (text("config.json", '{"a": ' + "1" * 5000 + "}"), "config.json"),
    "infinite eps": (keys(rms_norm_eps=float("inf")), "rms_norm_eps = inf"),
    "a million layers": (keys(num_hidden_layers=10**6), "num_hidden_layers = 1000000: more than any model has"),
    "heads beyond counting": (keys(num_attention_heads=10**9), "num_attention_heads = 1000000000"),
    "long architecture": (keys(architectures=["x" * 10**6]), "architectures = ['xxx"),
    "dtype a number": (keys(dtype=5), "dtype = 5: must be str"),
    "torch_dtype a number": (
        in_json("config.json", lambda settings: (settings.pop("dtype", None), settings.update(torch_dtype=5))),
        "torch_dtype = 5: must be str",
    ),
    "end token a word": (keys(eos_token_id="stop"), "eos_token_id = 'stop'"),
    "generation config null": (text("generation_config.json", "null"), "generation_config.json: the top level must be"),
    "end tokens of no kind": (text("generation_config.json", '{"eos_token_id": [1, {}]}'), "eos_token_id = {}"),
    "negative end token": (text("generation_config.json", '{"eos_token_id": -1}'), "eos_token_id = -1"),
    "tokenizer cut": (text("tokenizer.json", '{"version": '), "tokenizer cannot be loaded"),
    "tokenizer settings a list": (text("tokenizer_config.json", "[]"), "tokenizer cannot be loaded"),
    "longest text a word": (
        text("tokenizer_config.json", '{"model_max_length": "64", "tokenizer_class": "PreTrainedTokenizerFast"}'),
        "tokenizer cannot be loaded: TypeError",
    ),
}


@pytest.mark.parametrize(("damage", "expected"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_damaged_files_are_one_clear_error(whole, damage, expected, tmp_path):
    model = shutil.copytree(whole / "single", tmp_path / "model")
    damage(model)
    assert expected in problems(whole, model, tmp_path)
