"""tools/docs_site.py makes pages of the site, and tools/check_site.py finds links of the site that lead nowhere."""

import re
from pathlib import Path

import check_site
import docs_site
import draw_paths
import pytest

from dppo_megatron.config import load

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
PAGES = {"docs/page.md": "page.md", "docs/settings.md": "settings.md", "README.md": "README.md", "docs/a.png": "a.png"}
PAGES |= {"tools/tables.py": "source/tools/tables.py.md", "docs/processes-light.svg": "processes-light.svg"}
PAGES |= {"docs/processes-dark.svg": "processes-dark.svg", "examples/README.md": "examples/README.md"}
PAGES |= {"docs/needle.png": "needle.png", "docs/needle-dark.png": "needle-dark.png"}


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr(docs_site, "uris", {Path(path): uri for path, uri in PAGES.items()})
    monkeypatch.setattr(docs_site, "settings", {"optimizer.lr"})


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("docs/page.md", "[x](../README.md#quickstart)", "[x](README.md#quickstart)"),
        ("docs/page.md", "[x](../tools/tables.py)", "[x](source/tools/tables.py.md)"),
        ("README.md", "[x](docs/page.md)", "[x](page.md)"),
        (
            "examples/README.md",
            "[x](../docs/page.md#part), [y](https://x.org/y)",
            "[x](../page.md#part), [y](https://x.org/y)",
        ),
        ("docs/page.md", "[x](#part)", "[x](#part)"),
        ("docs/page.md", "![x](a.png)", "![x](a.png)"),
        ("docs/page.md", "![x](needle.png)", "![x](needle.png#only-light) ![x](needle-dark.png#only-dark)"),
        (
            "README.md",
            "![x](docs/processes.svg)",
            "![x](processes-light.svg#only-light) ![x](processes-dark.svg#only-dark)",
        ),
        ("examples/README.md", "`optimizer.lr`, `lr`", "[`optimizer.lr`](../settings.md#optimizer.lr), `lr`"),
        ("docs/page.md", "# `optimizer.lr`\n[`optimizer.lr`](page.md)", "# `optimizer.lr`\n[`optimizer.lr`](page.md)"),
    ],
)
def test_links_lead_to_pages_of_the_site(site, path, text, expected):
    assert docs_site.with_links(text, Path(path)) == expected


def test_each_setting_has_an_anchor_and_its_description():
    names = re.findall(r"^\| `([\w.]+)` \|", SETTINGS, re.MULTILINE)
    page = docs_site.settings_as_headings(SETTINGS)
    assert re.findall(r"^### `([\w.]+)`.* \{ #\1 data-toc-label=\"\1\" \}$", page, re.MULTILINE) == names
    assert len(names) > 200
    assert not re.search(r"^\|", page, re.MULTILINE)
    assert "package.module:function {" in page
    assert "### `optimizer.lr` learning rate of Adam { #optimizer.lr" in page
    assert "\nadapters and tiny models need 1e-4 to 1e-3\n\nnumber > 0, default `1e-06`\n" in page


def test_the_table_has_every_name_of_another_trainer():
    table = docs_site.names_table()
    named = {name for row in table.splitlines()[2:] for name in re.findall("`([^`]+)`", row.split(" | ")[1])}
    assert named == load._ALIASES.keys()
    assert "| `optimizer.warmup_updates` (a count) | `lr_warmup_iters`" in table
    assert "<!-- other names -->" in (ROOT / "docs" / "other_trainers.md").read_text()


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("page/", None),
        ("page/#part", None),
        ("/page/index.html", None),
        ("a.png#only-light", None),
        ("https://example.org/x", None),
        ("#top", None),
        ("absent/", "no such file"),
        ("page/#absent", "no such anchor"),
        ("#absent", "no such anchor"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, capsys, link, problem):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text('<h2 id="part">Part</h2>')
    (tmp_path / "a.png").touch()
    (tmp_path / "index.html").write_text(f'<h1 id="top">x</h1><a href="{link}">x</a>')
    assert check_site.main(tmp_path) == (problem is not None)
    printed = capsys.readouterr().out
    assert printed.strip() == (
        f"index.html: {link}: {problem}" if problem else "site: every link and anchor of 2 pages leads somewhere"
    )


def test_a_site_without_pages_is_no_site(tmp_path):
    assert check_site.main(tmp_path) == 1


def test_the_pictures_of_the_paths_are_drawn_from_their_tables():
    pictures = draw_paths.paths((ROOT / "docs" / "paths.md").read_text())
    assert len(pictures) == 3
    for name, steps in pictures.items():
        assert len(steps) > 8
        assert (ROOT / "docs" / name).read_text() == draw_paths.draw(steps)
