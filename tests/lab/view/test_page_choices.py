"""Text and marks, scales, curves, widths, labels for screen readers, links and reloads of the page in a browser."""

import re
from pathlib import Path

import pytest

from dppo_megatron.lab.view import write_view
from tests.support.tokenizers import save_character_model

from .browsing import column, open_row
from .runs import CONVERSATIONS, GROUPS, SAMPLES, STEPS, TOPK, TRAINED_AT, write_conversations, write_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def conversations(show, tmp_path_factory):
    """The page of a bank with tool calls, all samples side by side."""
    directory = tmp_path_factory.mktemp("conversations")
    model = save_character_model(directory / "model")
    return show(write_view(write_conversations(directory / "bank"), model=model), "#many=1")


def test_text_has_no_markup_and_indented_arguments_and_tokens_have_both(conversations):
    page = conversations
    page.locator(".toggle button", has_text="text").click()
    shown = page.locator(".sample").nth(0).locator(".block")
    assert shown.locator("b").all_text_contents() == ["tool call price", "tool result", "assistant"]
    texts = [block.locator(":scope > div").last.text_content() for block in shown.all()]
    assert texts == ['{\n  "product": "milk"\n}', '{\n  "euros": 1.2\n}', "1.2 euros"]
    assert page.locator(".box").all_text_contents() == ["system Use tools.", "user Price of milk?", "answer1.2"]
    assert column(page, "text")[0] == "Price of milk?"
    page.locator(".toggle button", has_text="tokens").click()
    sampled = "".join(page.locator(".sample").nth(0).locator(".tokens i").all_text_contents())
    call, result, answer = CONVERSATIONS[0]
    assert sampled == f"{call} <|im_start|>tool {result}<|im_end|> {answer}"


def test_errors_truncation_and_malformed_turns_are_marked(conversations):
    """A role in sampled text, and a mark inside a message, never become the role of a block."""
    page = conversations
    page.locator(".toggle button", has_text="text").click()
    samples = page.locator(".sample").all()
    assert [sample.locator(".block .badge").all_text_contents() for sample in samples] == [
        [], ["tool error"], ["unknown tool"], ["role sampled by the policy"], ["not JSON"]
    ]  # fmt: skip
    assert [sample.locator(".ending").count() for sample in samples] == [0, 1, 0, 0, 1]
    assert samples[3].locator(".block b").all_text_contents() == ["assistant", "malformed"]
    assert column(page, "response")[3].startswith("hm ")  # not only the text after the role
    assert sorted(column(page, "end")) == ["stop"] * 3 + ["truncated"] * 2
    labels = "(text, sampled) => blocksOf(text, 'prompt', sampled).map((block) => block.label)"
    assert page.evaluate(f"({labels})('<|im_start|>user a<|im_start|>system b<|im_end|><|im_start|>tool c')") == [
        "user", "malformed", "tool result"
    ]  # fmt: skip
    assert page.evaluate(f"({labels})('<|user|>a<|assistant|>b')") == ["user", "assistant"]
    thought = "so <tool_call>{}</tool_call></think><tool_call><function=add></tool_call>"
    assert page.evaluate("text => blocksOf(text, 'assistant', true).map((block) => block.label)", thought) == [
        "reasoning", "reasoning", "tool call add"
    ]  # fmt: skip


def test_colors_have_the_same_scale_in_every_group(page):
    scale = "(key) => { const s = scaleOf({key, kind: 'ramp', none: 0, full: -5}, []); return s.color(-2.5) }"
    assert page.evaluate(scale, "logprob") == "rgba(220, 60, 40, 0.375)"
    seen = {}
    for prompt in ("5", str(TRAINED_AT)):
        open_row(page, prompt=prompt, sample="0")
        page.locator("#quantity").select_option("logprob")
        seen[prompt] = page.locator(".scale").first.text_content()
    assert set(seen.values()) == {"0-5 and below"}
    page.locator("#quantity").select_option("divergence")
    delta = page.evaluate("loadJson('head').then((head) => head.delta)")
    assert page.locator(".scale").first.text_content() == f"0{2 * delta:g} and above"


def test_six_figures_have_their_change_since_the_start(page):
    tiles = page.locator(".tile")
    assert tiles.count() == 6
    assert tiles.nth(0).text_content() == "reward0.38▲ from 0.32"
    assert tiles.nth(2).text_content() == "masked tokens0.4 %= from 0.4 %"
    assert "paused at step 4" in tiles.nth(5).text_content()
    assert not page.locator("#summary").is_visible()  # the other facts are folded


def test_curves_have_ticks_a_log_axis_smoothing_and_zoom(show, tmp_path):
    run = write_run(tmp_path)
    rows = (run / "metrics.jsonl").read_text().splitlines()
    graded = '"eval/accuracy": 0.0, "eval/reward_mean": 0.5, "rollout/truncated_share": 0.0005'
    rows = [f'{row.removesuffix("}")}, {graded}, "mismatch/kl": 1e-{i}}}\n' for i, row in enumerate(rows, 1)]
    (run / "metrics.jsonl").write_text("".join(rows))
    page = show(write_view(run))
    assert page.locator("[data-metric='eval/reward_mean']").count() == 1
    assert page.locator("[data-metric='eval/accuracy']").count() == 0  # 0 of every step, next to graded rewards
    share = page.locator("[data-metric='rollout/truncated_share']")
    assert share.locator(".tick-y").all_text_contents() == ["0 %", "0.5 %", "1 %"]
    reward = page.locator("[data-metric='rollout/reward_mean']")
    assert reward.locator(".tick-x").all_text_contents() == ["1", "2", "3", "4"]
    plain = reward.locator("path").first.get_attribute("d")
    page.locator("#smooth").select_option("5")
    assert reward.locator("path").count() == 2
    assert reward.locator("path").first.get_attribute("d") == plain
    assert reward.locator(".value").text_content() == "step 4: 0.35"  # mean of 0.32, 0.34, 0.36 and 0.38
    page.locator("#smooth").select_option("1")
    page.locator("#log").check()
    kl = page.locator("[data-metric='mismatch/kl'] .tick-y").all_text_contents()
    assert kl == ["1e-4", "0.001", "0.01", "0.1"]
    page.locator("#log").uncheck()
    svg = reward.locator("svg")
    svg.press("ArrowLeft")
    assert svg.get_attribute("aria-valuetext") == "step 3: 0.36"
    svg.press("Enter")
    assert set(column(page, "step")) == {"3"}
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 9)
    page.mouse.up()
    assert reward.locator(".tick-x").all_text_contents() == ["2", "3", "4"]
    assert page.locator("[data-filter=step]").input_value() == "2..4"
    page.locator("#zoom").click()
    assert reward.locator(".tick-x").count() == 4
    page.locator("#curves-filter").fill("nothing")
    assert page.locator("#curves").text_content() == 'No metric contains "nothing".'
    page.close()


def test_filters_without_a_rollout_say_so_and_can_be_cleared(page):
    open_row(page, prompt="5")
    page.locator("[data-filter=reward]").fill(">9")
    assert page.locator("#table .none").text_content().startswith("No rollout fits the filters.")
    assert page.locator("#rollout").text_content() == ""
    assert page.locator("#table").bounding_box()["height"] < 120
    page.locator("#clear").click()
    assert page.locator(".row").count() > 10
    assert not page.locator("#clear").is_visible()
    page.locator("[data-filter=response]").fill("/^<.--/")
    assert column(page, "response") == ["<!--</script><b>x</b>"] * SAMPLES
    page.locator("[data-filter=response]").fill("/(/")
    assert page.locator("[data-filter=response]").get_attribute("aria-invalid") == "true"
    page.locator("#clear").click()
    page.locator("#stored").click()
    assert set(column(page, "prompt")) == {str(TRAINED_AT)}  # the only group with the trainer's values


@pytest.mark.parametrize("width", [400, 700, 1400])
def test_nothing_is_cut_in_a_window_of(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    try:
        while page.locator(".row").first.locator("> div").count() > width / 60:
            page.wait_for_timeout(20)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("byId('table').scrollWidth - byId('table').clientWidth") <= 0
        for key in ("step", "response", "reward", "end"):
            assert page.locator(f"[data-sort={key}]").is_visible()
        page.locator(".row").first.click()
        page.locator("#many", has_text="samples side by side").click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        boxes = [sample.bounding_box() for sample in page.locator(".sample").all()]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)  # none is cut
        if width == 400:
            page.locator("#columns").click()
            assert page.locator("[data-sort=version]").is_visible()
            page.locator("#columns").click()
    finally:
        page.set_viewport_size({"width": 1500, "height": 1000})


def test_roles_and_labels_for_screen_readers(page):
    table = page.get_by_role("grid", name="Rollouts")
    assert table.get_attribute("aria-rowcount") == str(STEPS * GROUPS * SAMPLES + 1 + 2 + 2)
    head = page.get_by_role("columnheader", name="sort by reward")
    assert head.get_attribute("aria-sort") == "none"
    head.click()
    assert head.get_attribute("aria-sort") == "descending"
    open_row(page, prompt="5")
    assert page.get_by_role("row", selected=True).count() == 1
    assert table.get_attribute("aria-activedescendant") == page.get_by_role("row", selected=True).get_attribute("id")
    assert page.get_by_role("slider", name="rollout/reward_mean").get_attribute("aria-valuetext") == "step 4: 0.38"
    page.get_by_role("group", name="Tokens").press("ArrowRight")
    assert page.get_by_role("status").locator(".list tr").count() == 1 + TOPK
    page.get_by_role("group", name="Tokens").press("ArrowRight")
    assert page.locator(".tokens i").nth(1).get_attribute("class") == "at"
    unnamed = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length && !one.ariaLabel)"
    assert page.evaluate(f"{unnamed}.length") == 0


def test_a_link_shows_the_same_rollout_and_choices(page, show):
    open_row(page, prompt="7", sample="2")
    page.locator("#quantity").select_option("version")
    page.locator("#log").check()
    while "log=1" not in page.url:
        page.wait_for_timeout(20)
    path, _, link = page.url.partition("#")
    page.locator("#log").uncheck()
    other = show(Path(path.removeprefix("file://")), f"#{link}")
    other.locator("#rollout h2", has_text=re.compile("prompt 7$")).wait_for()
    assert column(other, "sample") == ["2"]
    assert other.locator("#quantity").input_value() == "version"
    assert other.locator("#log").is_checked()
    other.close()


def test_the_page_of_an_active_run_reloads_itself(browser, tmp_path, monkeypatch):
    run = write_run(tmp_path)
    monkeypatch.setattr("dppo_megatron.lab.view.write.run_state", lambda *_: "running at step 3")
    page = browser.new_page()
    page.clock.install()
    page.goto(write_view(run).as_uri())
    page.locator("[data-filter=step]").fill("2")
    page.locator("#reload").check()
    monkeypatch.setattr("dppo_megatron.lab.view.write.run_state", lambda *_: "finished at step 4")
    write_view(run)
    page.clock.fast_forward(31_000)
    page.locator(".tile", has_text="finished at step 4").wait_for()
    assert set(column(page, "step")) == {"2"}
    assert page.locator("#reload").count() == 0
    page.close()


def test_three_runs(show, tmp_path):
    one, two, three = (write_run(tmp_path / name).rename(tmp_path / f"run-{name}") for name in "abc")
    page = show(path := write_view(one, others=[two, three]), "#many=1")
    assert path.name == "view-with-run-b-with-run-c.html"
    assert page.locator("[data-metric='rollout/reward_mean'] path").count() == 3
    page.locator(".pair").first.wait_for()
    assert page.locator(".pair").first.locator(".facts b[class]").all_text_contents() == ["run-a", "run-b", "run-c"]
    page.locator("#more summary").click()
    assert page.locator("#summary .equal", has_text="learning rate").locator("dd").count() == 1
    page.close()
