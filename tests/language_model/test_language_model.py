"""A real language model in every part of a run: each test is a row of `make test-language-model`."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.bank import BankReader
from tests.language_model.conftest import PROMPTS
from tests.rollout.engines import test_contract as contract
from tests.support import runs
from tests.support.engines import Reference
from tests.support.model_directories import same_weights
from tests.train.weight_sync.test_real_engines import check_scores, publish
from tests.train.weight_sync.trainer_process import UPDATE

pytestmark = pytest.mark.language_model
TENSORS, END = 272, 2  # the head is the embedding; <|im_end|>
# Largest difference of log-probs: the logits reach 38, where bf16 has steps of 0.25.
FP32, BF16 = contract.TOLERANCE, 1.0
LAYOUTS = {"tensor": 3, "pipeline": 2, "context": 2, "data": 2}


def groups_of(run: Path) -> list:
    reader = BankReader(run / "bank")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    return sorted(groups, key=lambda group: group.prompt.position)


def answers_of(run: Path, name: str, version: int = 0) -> list[dict]:
    return [json.loads(line) for line in (run / f"answers/{name}/v{version:06d}.jsonl").read_text().splitlines()]


def column(run: Path, name: str) -> list[float]:
    return [record[name] for record in runs.records(run) if name in record]


@pytest.fixture(scope="session")
def transformers(task):
    """transformers' own tokenizer and model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task / "random_model", dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(task / "random_model"), model


def chats(rows: Path, tokenizer) -> list[list[int]]:
    """Return the prompts of a data file as transformers tokenizes them."""
    users = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in rows.read_text().splitlines()]
    return tokenizer.apply_chat_template(users, add_generation_prompt=True, return_dict=False)


def test_chat_template_and_end_tokens_are_those_of_transformers(trained, task, transformers):
    expected, reasons = chats(task / "train.jsonl", transformers[0]), set()
    for group in groups_of(trained):
        assert group.prompt.token_ids.tolist() == expected[group.prompt.row]
        for rollout in group.rollouts:
            ends = rollout.token_ids == END
            assert not ends[:-1].any()
            assert rollout.finish_reason == ("stop" if ends[-1] else "length")
            assert ends[-1] or len(ends) == 24
            reasons.add(rollout.finish_reason)
    assert reasons == {"stop", "length"}


def test_logprobs_of_a_run_are_those_of_transformers(trained, task):
    groups = groups_of(trained)
    reference = Reference(task / "random_model")
    for group in groups[:PROMPTS]:
        rollout = group.rollouts[0]
        expected = reference.sampled(rollout.token_ids, group.prompt.token_ids)
        assert np.abs(rollout.rollout_logprob - expected).max() < FP32
    assert {int(v) for group in groups[PROMPTS:] for rollout in group.rollouts for v in rollout.versions} == {1}
    assert all(0 < difference < FP32 for difference in column(trained, "mismatch/max_abs_logprob_difference"))


def test_greedy_text_is_that_of_transformers(trained, task, transformers):
    tokenizer, model = transformers
    prompts = {"input_ids": chats(task / "heldout.jsonl", tokenizer)}
    inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
    texts = model.generate(**inputs, do_sample=False, max_new_tokens=24)[:, inputs["input_ids"].shape[1] :]
    expected = tokenizer.batch_decode(texts, skip_special_tokens=True)
    assert {answer["row"]: answer["samples"][0]["text"] for answer in answers_of(trained, "greedy")} == dict(
        enumerate(expected)
    )


def test_evaluation_sets(trained):
    assert [record["step"] for record in runs.records(trained) if "eval/greedy/avg@1" in record] == [0, 2]
    for name, n in {"greedy": 1, "sampled": 4}.items():
        for version, average in zip((0, 2), column(trained, f"eval/{name}/avg@{n}"), strict=True):
            rewards = [[s["reward"] for s in answer["samples"]] for answer in answers_of(trained, name, version)]
            assert np.shape(rewards) == (8, n)
            assert np.mean(np.array(rewards) >= 1) == pytest.approx(average)


def test_conversion_there_and_back_has_equal_bits_and_a_tied_head(trained, tmp_path):
    model, there, back = trained / "model", tmp_path / "megatron", tmp_path / "hf"
    runs.run("convert", "hf-to-megatron", model, there, "--tensor", "3", "--pipeline", "2")
    runs.run("convert", "megatron-to-hf", there, back)
    same_weights(model, back)
    assert len(hf.SafetensorsDirectory(back).tensors) == TENSORS


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_process(trained, train, name):
    parallel = {"world_size": LAYOUTS[name], **({} if name == "data" else {name: LAYOUTS[name]})}
    run = train(name, parallel=parallel, rollout={"bank": str(trained / "bank")})
    for metric, rel in {"train/loss": 1e-5, "train/grad_norm": 1e-4}.items():
        assert column(run, metric) == pytest.approx(column(trained, metric), rel=rel, abs=1e-7), metric


@pytest.mark.slow
def test_a_run_ended_by_kill_9_resumes_with_equal_bits(trained, tree):
    run, output = trained.with_name("killed"), trained.with_name("killed.out")
    config = runs.write_config(tree("killed", rollout={"bank": str(trained / "bank")}), run.with_suffix(".yaml"))
    process = runs.start("train", config, output=output)
    runs.wait_until((run / "checkpoints/latest").exists, "a checkpoint", process, output)
    for member in [*runs.descendants(process), process]:
        os.kill(member.pid, signal.SIGKILL)
    process.wait()
    assert 2 not in runs.steps_done(run)
    runs.run("train", config, "--resume")
    assert runs.steps_done(run) == [1, 2]
    assert runs.weights_digest(run) == runs.weights_digest(trained)


@pytest.mark.smoke
def test_a_tool_environment_is_rejected_because_the_template_shows_no_tools(task, tree):
    config = task.parent / "tools.yaml"
    runs.write_config(tree("tools", environment={"name": "tests.rollout.environments.worlds:Table"}), config)
    refused = runs.run("validate", config, check=False)
    assert refused.returncode == 2
    assert "chat template does not suit them: it does not show tools to the policy" in refused.stderr + refused.stdout


@pytest.mark.slow
def test_an_adapter_in_peft_is_the_merged_model(trained, train, task, transformers):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = {"model": {"dtype": "fp32", "lora": {"r": 8}}, "optimizer": {"lr": 1e-3}}
    run = train("lora", **lora, rollout={"bank": str(trained / "bank")})
    paths = (task / "random_model", run / "model")
    start, merged = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    tokens = torch.tensor(groups_of(trained)[0].prompt.token_ids)[None].long()
    with torch.no_grad():
        before, after = start(tokens).logits, merged(tokens).logits
        adapted = PeftModel.from_pretrained(start, run / "adapter")(tokens).logits  # PEFT changes `start`
    assert (adapted - after).abs().max() < 1e-3 < 0.01 < (after - before).abs().max()


@pytest.mark.slow
def test_the_trained_model_teaches_the_start_model(trained, train, transformers):
    from transformers import AutoModelForCausalLM

    teacher = {"path": str(trained / "model"), "in_trainer": True}
    settings = {"distillation": "reverse_kl", "distillation_coefficient": 1.0, "advantage_weight": 0.0}
    run = train(
        "distilled",
        rollout={"bank": str(trained / "bank")},
        objective={"name": "dppo_binary_tv", "settings": {"delta": 0.2, **settings}},
        distillation={"topk": 64, "teachers": {"trained": teacher}},
    )
    models, gaps = (transformers[1], AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)), []
    for group in groups_of(trained)[:PROMPTS]:
        for rollout in group.rollouts:
            tokens = torch.tensor(np.concatenate([group.prompt.token_ids, rollout.token_ids])).long()[None]
            with torch.no_grad():
                ln_p, ln_t = (m(tokens).logits[0, len(group.prompt.token_ids) - 1 : -1].log_softmax(-1) for m in models)
            gaps += (ln_p.exp() * (ln_p - ln_t)).sum(1).tolist()
    # The list and the rest as one token are a lower bound.
    assert 0.95 * np.mean(gaps) < column(run, "distillation/divergence")[0] < 1.001 * np.mean(gaps)


@pytest.mark.slow
def test_an_fp8_export_is_read_back(task, tmp_path):
    runs.run("convert", "hf-to-hf", task / "random_model", tmp_path / "fp8", "--quantization", "fp8_block")
    stored, source = hf.SafetensorsDirectory(tmp_path / "fp8"), hf.SafetensorsDirectory(task / "random_model")
    read = hf.open_weights(tmp_path / "fp8", hf.read_hf_config(tmp_path / "fp8"))
    rounded = {name for name, info in stored.tensors.items() if info.dtype == torch.float8_e4m3fn}
    assert len(rounded) == 30 * 7
    for name in source.tensors:
        error = (read.tensor(name).float() - source.tensor(name)).norm() / source.tensor(name).norm()
        assert error < (0.04 if name in rounded else 2**-8), name


@pytest.mark.slow
def test_drafts_from_the_bank_change_no_token(trained, train, record_property):
    """Both steps have the same eight prompts, so the second has drafts."""
    run = train("drafted", engine={"draft_tokens": 4, "draft_batch": 64})
    for group, same in zip(groups_of(trained), groups_of(run), strict=True):
        for rollout, drafted in zip(group.rollouts, same.rollouts, strict=True):
            np.testing.assert_array_equal(rollout.token_ids, drafted.token_ids)
    accepted = column(run, "drafts/accepted_share")
    assert max(accepted) > 0
    seconds = [column(directory, "time/generate_s")[-1] for directory in (trained, run)]
    record_property("accepted, seconds without and with", [round(n, 2) for n in (accepted[-1], *seconds)])


@pytest.mark.slow
def test_certify_finds_no_difference_after_a_publish(trained, served, tree):
    """It publishes the run's last checkpoint to the engine."""
    config = runs.write_config(tree("certified", (served().url,)), trained.with_name("certified.yaml"))
    runs.run("certify", config, "--run", trained, "--prompts", "4", "--within", str(FP32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "transport"),
    [
        ("vllm", "fp32", "shared_storage"),
        ("vllm", "fp32", "broadcast"),
        ("vllm", "bf16", "delta"),
        ("sglang", "fp32", "broadcast"),
        ("sglang", "bf16", "delta"),
    ],
)
def test_an_engine_has_the_logprobs_of_transformers_and_every_publish(
    served, task, monkeypatch, record_property, kind, dtype, transport
):
    """Each publish compares the fingerprints of all tensors."""
    server, tolerance = served(kind, dtype), FP32 if dtype == "fp32" else BF16
    monkeypatch.setattr(contract, "TOLERANCE", tolerance)
    contract.test_logprobs_and_topk_match_the_reference(server, 1.0)
    if dtype == "fp32":
        contract.test_greedy(server)
    directory, start = task.parent / f"{kind}-{transport}", server.models["a"]
    sent = {"full_every": 9} if transport == "delta" else {"transport": transport}
    settings = {"engine": {"kind": kind, "unavailable_timeout_s": 300}, "parallel": {"timeout_s": 300}, **sent}
    settings |= {"dtype": dtype, "fingerprint": True, "timeout_s": 300}
    records = publish(directory, start, [server.url], [start, UPDATE, start], **settings)
    updated = directory / "records.2.weights"
    assert len(hf.SafetensorsDirectory(updated).tensors) == TENSORS
    check_scores(records, (start, updated, start), [server.url], tolerance)
    shares = [record["changed_share"] for record in records]
    assert [share is None or 0 < share < 0.1 for share in shares] == [True] * 3
    assert (shares[1] is None) == (transport != "delta")
    record_property("publish_s", [round(record["seconds"], 1) for record in records])
