"""What tests of the page read from it and click."""

import re


def column(page, key: str) -> list[str]:
    heads = page.locator(".heads .line:first-child > div").evaluate_all("all => all.map(one => one.dataset.sort)")
    return page.locator(f".row > div:nth-child({heads.index(key) + 1})").all_text_contents()


def open_row(page, view: str = "tokens", **filters: str) -> None:
    for key, value in filters.items():
        page.locator(f"[data-filter={key}]").fill(value)
    of, prompt = column(page, "set")[0], column(page, "prompt")[0]
    page.locator(".row").first.click()
    page.locator("#rollout h2", has_text=re.compile(rf"^{of}, .*, prompt {prompt}$")).wait_for()
    page.locator(".toggle button", has_text=view).click()


def colours(page) -> list[str]:
    return page.locator(".tokens i").evaluate_all("all => all.map(one => one.style.background)")
