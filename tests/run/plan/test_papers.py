"""Each config of the papers passes all rules with every method, and fits the machines that it names."""

import re
import shlex
from pathlib import Path

import pytest

from dppo_megatron.config import ConfigError
from dppo_megatron.run.checks import load_config, preflight, slurm
from dppo_megatron.run.plan import Cluster, hardware, make_plan, report

ROOT = Path(__file__).parents[3]
PAPERS = ROOT / "examples/papers"
CONFIGS = sorted(PAPERS.glob("*.yaml"))
OPTIONS = re.findall(r"^\| ([^|`]+) \| `(--set .*)` \|$", (PAPERS / "README.md").read_text(), re.MULTILINE)
NODES = re.compile(r"--nodes (\d+) --gpus-per-node 8 --gpu (\S+)")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)  # paths of the configs


def row_of(path: Path) -> str:
    return next(line for line in (PAPERS / "README.md").read_text().splitlines() if f"`{path.name}`" in line)


def overrides(options: str) -> list[str]:
    return [word for word in shlex.split(options) if word != "--set"]


def test_the_readme_names_every_config_and_many_methods():
    text = (PAPERS / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in CONFIGS)
    assert len(CONFIGS) == 8
    assert len(OPTIONS) == 35


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_nothing_but_files_is_missing(path):
    """On a login node, where `slurm` checks it: only the model's weights and tokenizer, and prompts."""
    with pytest.raises(ConfigError) as refused:
        preflight(load_config(path), str(path), place="elsewhere")
    problems = {line.split(" = ")[0] for line in str(refused.value).splitlines()[1:]}
    assert problems == {
        f"  - {name}" for name in ("model.path", "data.train", "eval.sets.aime24.path", "eval.sets.aime25.path")
    }


def test_the_papers_thresholds_and_batches():
    """DPPO (arXiv 2602.04879 v3) and DRPO (arXiv 2606.09821), where they differ from our presets."""
    lora = load_config(PAPERS / "dppo_30b_a3b_lora.yaml")
    r, model = lora.rollout, lora.model.lora
    assert (r.prompts_per_step, r.group_size, r.max_response_tokens, lora.train.updates_per_step) == (128, 8, 8000, 8)
    assert (model.r, model.alpha, lora.optimizer.lr, lora.objective.settings["delta"]) == (32, 64, 1e-5, 0.15)
    thresholds = {
        name: load_config(PAPERS / "drpo_4b.yaml", overrides(options)).objective.settings for name, options in OPTIONS
    }
    assert thresholds["SPO"] == {"epsilon": 12.5}
    assert thresholds["MiniRL"] == thresholds["MiniRL-TIS"] == {"epsilon_high": 0.28}
    assert thresholds["DRPO's baseline: DPPO, binary TV"] == {"delta": 0.15}
    assert thresholds["DRPO's baseline: GRPO"] == {"epsilon_low": 0.2, "epsilon_high": 0.28}


def test_engines_of_an_asynchronous_run_have_as_many_nodes_as_the_trainer():
    options = dict(OPTIONS)["asynchronous (not in the papers)"]
    for path in CONFIGS:
        nodes = load_config(path).slurm.trainer_nodes
        config = load_config(path, [*overrides(options), f"slurm.engine_nodes={nodes}"])
        assert slurm.problems(config, None) == []


@pytest.mark.parametrize(("method", "options"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_every_method_goes_with_every_config_it_is_for(method, options):
    for path in CONFIGS:
        skipped = "experts only" in method and "a3b" not in path.stem, "not with LoRA" in method and "lora" in path.stem
        if not any(skipped):
            config = load_config(path, overrides(options))
            assert config.checkpoint.keep_rollouts == 0
            assert config.optimizer.weight_decay == 0.01
            assert {one.n for one in config.eval_sets.values()} <= {16, 32}


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_each_fits_the_machines_that_it_names(builder, path):
    nodes, gpu = NODES.search(path.read_text()).groups()
    plan = make_plan(load_config(path), Cluster(int(nodes), 8, hardware(gpu)), builder)
    assert plan.fits, report(plan, [])
    spare = re.search(r"fits: (\S+ GiB) of", report(plan, []))[1]
    assert f"{int(nodes) * 8} GPUs, {spare} of each to spare |" in row_of(path)
    assert "with checkpoint.keep_rollouts = 0" in report(plan, [])
    assert slurm.problems(plan.config, None) == []
    assert plan.config.slurm.trainer_nodes == int(nodes)
