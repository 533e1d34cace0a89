"""Names and texts of a run drawn at random: neither a report nor a page takes them for HTML or Markdown."""

import html
import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from rich.console import Console

from dppo_megatron.lab.view import write_view
from dppo_megatron.report import report as module
from dppo_megatron.report.report import write_report
from tests.attack import cases, generator
from tests.lab.view.runs import write_run

PIECES = [
    "<", ">", "</script>", "<img src=x onerror=alert(1)>", "<!--", "-->", "&lt;", "&#60;", "[", "](", ")", "![",
    "[a](http://b.c)", "http://b.c", "www.b.c", "|", "\\", "\\|", "`", "``", "*", "**", "_", "__", "~~", "$", "$$",
    "#", "- ", "> ", "\n\n", "\n# ", "\t", "\u2028", "\u202e", "\x1b[31m", "\x00", "__proto__", "constructor",
    "%%STYLE%%", "{{", "}}", "a", "b ", "7", "é", "\ud800",
]  # fmt: skip


def text(at: random.Random) -> str:
    return "".join(at.choice(PIECES) for _ in range(at.randint(1, 8)))


class Elements(HTMLParser):
    def __init__(self, content: str):
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(content)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def hostile_run(root: Path, at: random.Random) -> Path:
    run = write_run(root)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [
        text(at),
        f"eval/{text(at)}/avg@8",
        f"eval/{text(at)}/avg@8",
        f"eval/{text(at)}/accuracy",
        f"time/{text(at)}_s",
    ]
    for record in records:
        record.update({name: at.random() for name in names})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokens = [{"id": i, "text": text(at), "count": 1, "share": 0.5} for i in range(2)]
    (run / "masked_tokens.jsonl").write_text(json.dumps({"step": 1, "masked": 2, "tokens": tokens}) + "\n")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["objective"] = {"name": text(at), "settings": {text(at): text(at)}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    name = text(at).translate({0: None, ord("/"): None, 0xD800: None}).strip(".")
    return run.rename(root / f"<img src=x>{name}")


def test_no_name_or_text_of_a_run_becomes_markup(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "draw_curves", lambda runs, path: None)  # takes seconds
    usual = write_run(tmp_path / "usual")
    shown = write_view(usual, tmp_path / "usual.html").read_text()
    page = Elements(shown).found
    assert 'http-equiv="Content-Security-Policy"' in shown
    assert not {"src", "href", "onerror"} & {name for _, names in page for name in names}, "nothing is fetched"
    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    for number in range(cases(6)):
        run = hostile_run(tmp_path / str(number), generator("markup", number))
        assert Elements(write_view(run, tmp_path / "view.html").read_text()).found == page, number
        one = write_report(run, tmp_path / "report", console=Console(file=io.StringIO())).read_text()
        two = write_report([run, usual], tmp_path / "report", console=Console(file=io.StringIO())).read_text()
        for written in (one, two):
            inline = [token for token in markdown.parse(written) if token.type == "inline"]
            kinds = [token.type for cell in inline for token in cell.children]
            images = kinds.count("image")
            assert images == 1, (number, "curves.png")
            rest = set(kinds) - {"text", "text_special", "softbreak", "image", "code_inline", "html_inline"}
            assert not rest, (number, rest)
            assert "html_inline" not in kinds, number
            assert kinds.count("code_inline") == 1, (number, "`other`, of the notes")
            assert not re.search(r"\w://|www\.", written), number
            columns = {len(row.split("</t")) for row in re.findall("<tr>.*?</tr>", markdown.render(written), re.DOTALL)}
            assert columns == {3 + (written is two) + 1}, (number, columns)
        assert html.unescape(markdown.render(one)).count("curves") >= 2
