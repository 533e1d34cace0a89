"""The page in a real browser without a network: `make test-browser` installs the browser and what drives it."""

import shutil
import time

import pytest

from dppo_megatron.bank import allow_deletion
from dppo_megatron.lab.view import write_view
from dppo_megatron.lab.view.tokens import RETIRED
from tests.support.speed import copying_s

from .browsing import colours, column, open_row
from .runs import GROUPS, HOSTILE, SAMPLES, STEPS, TOPK, TRAINED_AT, TURNS_AT, write_bank, write_run

pytestmark = pytest.mark.browser

ROLLOUTS, WRITE_COPIES, SHOW_MS = 10_000, 800, 1000.0


@pytest.mark.smoke
def test_a_row_for_every_rollout_and_answer(page):
    assert page.locator("#count").text_content() == str(STEPS * GROUPS * SAMPLES + 1 + 2)  # a branch, two answers
    assert column(page, "step")[:5] == ["3"] * (SAMPLES - 1) + ["1"] * 2  # rows with the trainer's values come first
    assert page.locator("#title").text_content() == "run"


def test_sorting_by_a_heading_both_ways(page):
    head = page.locator("[data-sort=tokens]")
    head.click()
    downwards = list(map(int, column(page, "tokens")))
    head.click()
    upwards = list(map(int, column(page, "tokens")))
    assert downwards == sorted(downwards, reverse=True)
    assert upwards == sorted(upwards)
    assert downwards[0] > upwards[0]


@pytest.mark.parametrize(
    ("key", "typed", "fits"),
    [
        ("step", "2", lambda v: v == "2"),
        ("step", "2..3", lambda v: v in "23"),
        ("reward", ">0.5", lambda v: float(v) > 0.5),
        ("advantage", "<0", lambda v: float(v) < 0),
        ("set", "SUM", lambda v: v == "sums"),
        ("end", "trunc", lambda v: v == "truncated"),
    ],
)
def test_filters(page, key, typed, fits):
    page.locator(f"[data-filter={key}]").fill(typed)
    values = column(page, key)
    assert values
    assert all(map(fits, values))
    assert page.locator("#count").text_content().startswith(f"{len(values)} of ")


def test_tokens_have_the_colour_of_the_chosen_quantity(page):
    open_row(page, prompt="5")
    page.locator("#quantity").select_option("version")
    seen = colours(page)
    assert len(seen) == int(column(page, "tokens")[0])
    assert len(set(seen)) == 2  # half is of version 0, half of version 1
    assert seen[0] != seen[-1]
    page.locator("#quantity").select_option("logprob")
    assert len(set(colours(page))) > 2
    assert {"mass", "entropy"} < set(page.locator("#quantity option").evaluate_all("all => all.map(one => one.value)"))


def test_a_token_under_the_pointer_shows_the_engines_list(page):
    open_row(page, prompt="5")
    page.locator(".tokens i").first.hover()
    tip = page.locator("#tip")
    tip.wait_for()
    assert tip.locator(".list tr").count() == 1 + TOPK
    drawn = tip.locator(".drawn td").first.text_content()
    assert drawn.strip('"') == page.locator(".tokens i").first.text_content()
    page.locator("#title").hover()
    tip.wait_for(state="hidden")


def test_tokens_are_coloured_by_stored_values_of_the_trainer(page):
    open_row(page, prompt=str(TRAINED_AT), sample="0")
    page.locator("#quantity").select_option("masked")
    seen = colours(page)
    assert [bool(colour) for colour in seen] == [i % 2 == 1 for i in range(len(seen))]
    assert page.locator(".tokens i.masked").count() == len(seen) // 2
    page.locator("#quantity").select_option("ratio")
    assert "40, 100, 220" in colours(page)[0]  # below the engine's
    assert "220, 60, 40" in colours(page)[1]
    page.locator("[data-filter=sample]").fill("")
    assert column(page, "masked").count("–") == 1  # nothing is stored of the last sample


def test_environment_spans_and_branches_are_distinguished(page):
    open_row(page, prompt=str(TURNS_AT))
    assert page.locator(".tokens .environment").count() > 0
    assert page.locator(".turn").all_text_contents() == ["turn 1", "turn 2"]
    page.get_by_role("button", name="0, branch 2", exact=True).click()
    page.locator(".tokens .inherited").first.wait_for()
    assert "trajectory 0, branch 2 of 2" in page.locator(".facts").text_content()
    page.locator(".tokens .environment").first.hover()
    assert "no loss here" in page.locator("#tip").text_content()


def test_the_samples_of_a_group_side_by_side(page):
    open_row(page, prompt="5")
    page.locator("#many").click()
    assert page.locator(".sample").count() == SAMPLES
    lengths = page.locator(".tokens").evaluate_all("all => all.map(one => one.querySelectorAll('i').length)")
    samples = map(int, column(page, "sample"))
    assert dict(enumerate(lengths)) == dict(zip(samples, map(int, column(page, "tokens")), strict=True))
    page.locator("#many").click()
    assert page.locator(".sample").count() == 1


def test_texts_are_shown_and_never_run(page):
    open_row(page, set="sums")
    shown = page.locator(".tokens").text_content()
    assert shown.startswith(HOSTILE[:-1])  # the lone surrogate is shown as the browser likes
    open_row(page, set="training", prompt="0")
    assert "".join(page.locator(".tokens i").all_text_contents()) == "<!--</script><b>x</b>"
    assert set(column(page, "response")) == {"<!--</script><b>x</b>"}
    assert column(page, "text")[0].startswith(HOSTILE[:20])
    assert page.locator("img, #rollout b:not(.facts b):not(.box b)").count() == 0


def test_two_runs_have_their_curves_and_the_samples_of_a_prompt_together(show, tmp_path):
    """The second run has no tokens of its first step, and a metric named as a property of every object."""
    one, two = write_run(tmp_path / "a").rename(tmp_path / "one"), write_run(tmp_path / "b").rename(tmp_path / "two")
    allow_deletion(two / "bank", 1)
    (two / "bank" / "segment-000000.bin").unlink()
    metrics = (two / "metrics.jsonl").read_text()
    (two / "metrics.jsonl").write_text(metrics.replace('"step"', '"constructor": 0.5, "__proto__": 0.25, "step"'))
    page = show(write_view(one, others=[two]))
    page.locator("#curves-filter").fill("r")
    assert page.locator("[data-metric='rollout/reward_mean'] path").count() == 2
    assert page.locator("[data-metric=constructor]").count() == 1
    open_row(page, run="one", prompt="5")
    page.locator("#many").click()
    assert page.locator(".sample .facts b[class]").all_text_contents() == ["one", "two"] * SAMPLES
    open_row(page, run="two", prompt="0", step="1")
    assert set(column(page, "response")) == {RETIRED}
    page.close()
    page = show(write_view(two), "#tokens=1")
    page.locator(".tokens i").first.wait_for()  # rows with tokens come first, and the first one is open
    assert page.locator(".row.open").count() == 1
    page.close()


def test_evaluations_are_paired_by_the_name_of_their_set(show, tmp_path):
    """Each run numbers its own sets, and both ask the same prompt of the same line."""
    one, two = write_run(tmp_path / "a").rename(tmp_path / "one"), write_run(tmp_path / "b").rename(tmp_path / "two")
    shutil.copytree(two / "answers" / "sums", two / "answers" / "hard")
    page = show(write_view(one, others=[two]))
    paired = page.evaluate("""async () => {
      const data = await loadTensors("table"), heads = [await loadJson("head")];
      heads.push(...heads[0].others);
      const row = data.set.findIndex((set, i) => set && !data.run[i]);
      return together(data, heads, row, () => "").map((rows) => rows.map((i) => heads[data.run[i]].sets[data.set[i]]));
    }""")
    assert paired == [["sums", "sums"], ["sums", "sums"]]
    page.close()


def test_a_conversation_has_roles_and_controls_are_visible(page):
    text = 'hm <tool_call>{"name": "add"}</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>'
    found = page.evaluate("text => blocksOf(text, 'assistant')", text)
    assert [block["label"] for block in found] == ["assistant", "tool call add", "tool result"]
    assert page.evaluate("make('i', '', 'a\u202eb').textContent") == "a\\u202eb"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system(page, scheme):
    page.emulate_media(color_scheme=scheme)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme=None)
    assert (colour == "rgb(255, 255, 255)") == (scheme == "light")


def test_arrows_go_from_row_to_row(page):
    open_row(page, set="training")
    page.locator("#table").focus()
    page.keyboard.press("ArrowDown")
    page.locator(".row.open:nth-child(2)").wait_for()
    assert page.locator(".row.open").count() == 1


def test_a_click_on_a_curve_filters_the_table_to_the_step(page):
    assert page.locator(".curve").count() >= 4
    page.locator("[data-metric='rollout/reward_mean'] svg").click(position={"x": 1, "y": 20})
    assert set(column(page, "step")) == {"1"}
    page.locator("#curves-filter").fill("time/")
    assert {"time/step_s", "time/wait_s"} <= set(
        page.locator(".curve").evaluate_all("all => all.map(c => c.dataset.metric)")
    )


def test_ten_thousand_rollouts_are_written_and_shown_in_time(show, tmp_path):
    samples, groups = 16, 25
    bank = write_bank(tmp_path / "bank", ROLLOUTS // samples // groups, groups, samples=samples, length=60)
    started = time.process_time()  # the machine may be busy with other tests
    path = write_view(bank)
    assert time.process_time() - started <= WRITE_COPIES * copying_s()  # 3 s on two quiet cores
    took = []
    for _ in range(3):
        page = show(path)
        assert page.locator("#count").text_content().startswith("10,0")
        assert page.locator(".row").count() < 100
        page.wait_for_timeout(200)
        took.append(page.evaluate("performance.getEntriesByName('table-shown')[0].startTime"))
        open_row(page, prompt="77")
        page.close()
    print(f"shown after {took} ms")
    assert min(took) <= SHOW_MS
