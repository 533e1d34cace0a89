"""Named sets, sampled several times, and the greedy one: on schedule, kept on disk, and continued where ended."""

import asyncio
import json

import pytest

from dppo_megatron.report.heldout import describe
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.orchestrator.evaluation import Evaluated, Evaluator, scores
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.fakes import orchestrator

SETS = {
    "aime": {"path": "a.jsonl", "n": 4, "temperature": 0.7, "top_p": 0.95, "max_response_tokens": 6},
    "math": {"path": "m.jsonl", "n": 2, "temperature": 1.0, "pass_reward": 0.5},
}


class Stopped(Exception):
    pass


@pytest.fixture
def config(tmp_path):
    return orchestrator.sampling_config(tmp_path / "run", sets=SETS)


def evaluate(config, engine, policy="a", *, count=5, names=("aime", "math"), then_s=0.0):
    """Run one evaluation of policy 0; an error of `engine` ends it. The event loop runs for `then_s` longer."""
    PublishedPolicy(0, "unused", 0.0).write(engine.published)
    directory = config.run.dir
    (directory / "records.jsonl").unlink(missing_ok=True)
    prompts = [orchestrator.Prompts().prompt(position) for position in range(count)]
    rewards = orchestrator.Rewards(lambda position: False, lambda position: position == 1)
    evaluator = Evaluator(
        config,
        sets={name: Evaluated(config.eval_sets[name], prompts, rewards) for name in names},
        tokenizer=orchestrator.Tokenizer(),
        stop_token_ids=(orchestrator.STOP,),
        output=directory / "records.jsonl",
        answers=directory / "answers",
    )

    async def main():
        try:
            return await evaluator.start(0, policy, Sampler(FixedEngines([engine])))
        finally:
            await asyncio.sleep(then_s)

    return asyncio.run(main())


def engine_of(config, **script):
    (config.run.dir / "weights").mkdir(parents=True, exist_ok=True)
    return orchestrator.ScriptedEngine(config.run.dir / "weights" / "published.json", **script)


def without_seconds(metrics):
    return {name: {k: v for k, v in one.items() if not k.endswith("seconds")} for name, one in metrics.items()}


def test_every_set_is_sampled_with_its_own_settings(config):
    engine = engine_of(config)
    metrics = evaluate(config, engine)
    by_set = {name: [r for r in engine.requests if f"-{name}-" in r.request_id] for name in SETS}
    assert {(r.n, r.temperature, r.top_p, r.max_tokens) for r in by_set["aime"]} == {(4, 0.7, 0.95, 6)}
    assert {(r.n, r.temperature, r.top_p, r.max_tokens) for r in by_set["math"]} == {(2, 1.0, 1.0, 8)}
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 5 * (4 + 2)
    # Sample i scores i, and the verifier fails on prompt 1.
    assert metrics["aime"]["eval/aime/avg@4"] == pytest.approx(3 * 4 / 20)
    assert metrics["aime"]["eval/aime/failed_share"] == pytest.approx(1 / 5)
    assert metrics["aime"]["eval/aime/pass@2"] == pytest.approx(4 / 5)
    assert metrics["math"]["eval/math/avg@2"] == pytest.approx(4 / 10)
    answers = [json.loads(line) for line in (config.run.dir / "answers/aime/v000000.jsonl").read_text().splitlines()]
    assert [len(record["samples"]) for record in answers] == [4] * 5
    assert answers[0]["prompt"] == "prompt 0"
    assert answers[0]["samples"][1] == {
        "text": answers[0]["samples"][1]["text"], "reward": 1.0, "failed": False,
        "tokens": len(answers[0]["samples"][1]["text"].split()), "finish": "stop", "versions": [0, 0],
        "final": answers[0]["samples"][1]["text"].split()[0],
    }  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), [(1.0, 0.0), (1.0, -1.0), (1.0, 0.1), (2.0, 1.5)])
def test_accuracy_is_the_share_of_right_answers_and_not_the_mean_reward(tmp_path, right, wrong):
    config = orchestrator.sampling_config(tmp_path / "run")
    tree = config.model_dump(mode="json") | {"eval": {"pass_reward": right}}
    chosen = type(config).model_validate(tree).eval_sets["heldout"]
    given = [(right, False)] * 81 + [(wrong, False)] * 18 + [(right, True)]  # the last one was not graded
    records = [
        {"samples": [{"reward": reward * (not failed), "failed": failed, "tokens": 3, "versions": [0, 0]}]}
        for reward, failed in given
    ]
    found = scores("heldout", chosen, records, 1.0)
    assert found["eval/accuracy"] == 0.81
    assert found["eval/reward_mean"] == pytest.approx((81 * right + 18 * wrong) / 100)
    same = "" if wrong == 0 else f", mean reward {(81 * right + 18 * wrong) / 100:.3f}"
    assert describe("heldout", found) == f"81 of 100 right{same}"


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_an_evaluation_that_was_killed_goes_on_and_reports_the_same(config, tmp_path, after):
    undisturbed = orchestrator.sampling_config(tmp_path / "undisturbed", sets=SETS)
    expected = evaluate(undisturbed, engine_of(undisturbed))
    first = engine_of(config, delay=lambda r: 0.002 * len(first.requests))
    first.fails = lambda r: Stopped() if len(first.requests) - first.running >= after else None
    with pytest.raises(Stopped):
        evaluate(config, first)
    answers = config.run.dir / "answers/aime/v000000.jsonl"
    answers.write_text(answers.read_text() + '{"position": 4, "samples"')  # the line that was being written
    kept = sum(len(path.read_text().splitlines()) for path in (config.run.dir / "answers").rglob("*.jsonl")) - 1
    second = engine_of(config)
    assert without_seconds(evaluate(config, second)) == without_seconds(expected)
    assert len(second.requests) == 10 - kept
    for path in (config.run.dir / "answers").rglob("*.jsonl"):
        other = undisturbed.run.dir / path.relative_to(config.run.dir)
        assert sorted(path.read_text().splitlines()) == sorted(other.read_text().splitlines())
    head = json.loads((config.run.dir / "answers/aime/v000000.json").read_text())
    assert without_seconds({"": head["metrics"]})[""] == {"step": 0, **without_seconds(expected)["aime"]}


def test_a_failed_answer_ends_the_others(config):
    failing = "eval-0-aime-0-0"
    engine = engine_of(
        config,
        delay=lambda request: 0.05 * (request.request_id != failing),
        fails=lambda request: Stopped() if request.request_id == failing else None,
    )
    with pytest.raises(Stopped):
        evaluate(config, engine, names=("aime",), then_s=0.2)
    assert len(engine.requests) > 1
    assert (config.run.dir / "answers/aime/v000000.jsonl").read_text() == ""


def test_answers_of_another_policy_or_of_other_settings_do_not_count(config):
    evaluate(config, engine_of(config))
    for change in ({"policy": "b"}, {"count": 6}):
        again = engine_of(config)
        evaluate(config, again, **change)
        assert len(again.requests) == 2 * change.get("count", 5)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["samples"], None),
        (["samples"], []),
        (["samples", 0], 7),
        (["samples", 0, "reward"], "right"),
        (["samples", 0, "reward"], float("nan")),
        (["samples", 0, "versions"], [0]),
        (["samples", 0, "tokens"], -1),
        (["samples", 0, "failed"], 3),
        (["position"], "2"),
        (["position"], 77),
    ],
)
def test_a_prompt_with_a_damaged_record_is_answered_again(config, path, value):
    expected = evaluate(config, engine_of(config))
    answers = config.run.dir / "answers/aime/v000000.jsonl"
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    *parents, last = path
    place = records[2]
    for key in parents:
        place = place[key]
    place[last] = value
    answers.write_text("".join(json.dumps(record) + "\n" for record in records))
    again = engine_of(config)
    assert without_seconds(evaluate(config, again)) == without_seconds(expected)
    assert len(again.requests) == 1


def test_a_run_evaluates_every_set_on_schedule_and_once(tmp_path):
    config = orchestrator.sampling_config(tmp_path / "run", sets=SETS)
    w = orchestrator.World(config)
    engine = w.engine()
    w.run_attempt(engine, until_groups=8)
    w.run_attempt(w.engine())
    greedy = [request for request in engine.requests if request.request_id.startswith("eval-0-0-")]
    assert [(request.temperature, request.n) for request in greedy] == [(0, 1)]
    for name in ("eval/accuracy", "eval/aime/avg@4", "eval/math/avg@2"):
        assert [record["step"] for record in w.records() if name in record] == [0, 2, 3]
    assert sorted(path.name for path in (w.run.answers / "aime").glob("*.jsonl")) == [
        "v000000.jsonl", "v000002.jsonl", "v000003.jsonl"]  # fmt: skip


def test_in_an_asynchronous_run_each_set_is_of_the_policy_that_answered_it(tmp_path):
    """The second set is answered when the next policy is there."""
    config = orchestrator.sampling_config(
        tmp_path / "run", steps=6, sets=SETS, max_staleness=1, max_concurrent_groups=1
    )
    w = orchestrator.World(config, training_s=0.03)
    w.run_attempt(w.engine(delay=lambda r: 0.2 if r.request_id.startswith("eval-0-aime") else 0.0))
    first = {}
    for record in w.records():
        for name in ("aime", "math"):
            if f"eval/{name}/prompts" in record:
                first.setdefault(name, record)
    assert first["aime"]["step"] == 0
    assert first["math"]["step"] > 0
    lines = (w.run.answers / "math/v000000.jsonl").read_text().splitlines()
    versions = [version for line in lines for sample in json.loads(line)["samples"] for version in sample["versions"]]
    assert min(versions) == first["math"]["step"]
    assert max(versions) - min(versions) == first["math"]["eval/math/version_spread"]
