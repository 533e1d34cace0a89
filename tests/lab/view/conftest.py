"""A browser without a network, and a page that tests share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dppo_megatron.lab.view import write_view

from .runs import TRAINED_AT, write_run, write_trained_tokens

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser does it")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: make test-browser does it where apt-get can")
    with api.sync_playwright() as started:
        # Root has no sandbox of the browser's kind, and /dev/shm of a container may be small.
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def show(browser) -> Iterator[Callable]:
    """f(file) -> the page, drawn. At the end: it asked for nothing else and complained of nothing."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000}, offline=True)
    asked, said = [], []

    def opened(path: Path, link: str = ""):
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri() + link)
        page.locator("html[data-shown]").wait_for(state="attached")
        assert asked.pop().partition("#")[0] == path.as_uri()
        return page

    yield opened
    context.close()
    assert (asked, said) == ([], [])


@pytest.fixture(scope="module")
def shared_page(show, tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("view"))
    write_trained_tokens(run, TRAINED_AT)
    return show(write_view(run))


@pytest.fixture
def page(shared_page):
    """The shared page without a filter and other choices of earlier tests."""
    shared_page.evaluate("() => [...address.keys()].forEach((key) => address.delete(key))")
    for field in shared_page.locator(".filters input, #curves-filter").all():
        field.fill("")
    return shared_page
