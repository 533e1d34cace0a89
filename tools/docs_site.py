"""Hook of mkdocs.yml: adds pages from outside docs/, resolves links to them, and writes parts that come from the code.

- README.md is the front page; docs/README.md becomes guide.md. Other linked Markdown files keep their path. Files of
  code are shown as they are (`source/PATH`), and a linked directory is a list of its files.
- The tables of settings.md become headings, so that each setting has an anchor and is found by the search. A setting's
  name in code links there.
- A picture with a namesake `...-dark` is shown in its colour scheme. An SVG has both schemes in one file.
- The table of other trainers' names is made from `config/other_names.txt` and `objectives/settings.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.config import load

if TYPE_CHECKING:  # the tests run without mkdocs
    from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FIRST = ("README.md", "docs/README.md", "CONTRIBUTING.md", "examples/README.md", "CHANGELOG.md", "SECURITY.md")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\.(png|svg)\)")
SPAN = re.compile(r"(?<![\[`])`([a-z_]+(?:\.\w+)+)`(?![\]`])")
ROW = re.compile(r"^\| `([\w.]+)` \| (.*?) (?<!\\)\| (.*?) (?<!\\)\| (.*?) ?\|$", re.MULTILINE)
TABLE_HEAD = re.compile(r"^\| setting \|.*\n\|---.*\n", re.MULTILINE)
DARK_STYLE = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\n) {4}\}", re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
MAX_LISTED = 20  # a directory with more files is listed without their contents

uris: dict[Path, str] = {}  # file or directory of the repository, relative to its root -> page
settings: set[str] = set()


def on_files(files: Files, *, config: Any) -> Files:
    """Add the linked files of the repository."""
    uris.clear()
    settings.update(name for name, *_ in ROW.findall((ROOT / "docs" / "settings.md").read_text()))
    for file in list(files):
        if file.src_uri == "README.md":
            files.remove(file)
        elif file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT):
            uris[Path(file.abs_src_path).relative_to(ROOT)] = file.src_uri
    queue = [*map(Path, FIRST), *(path for path in uris if path.suffix == ".md")]
    while queue:
        path = queue.pop(0)
        if path not in uris:
            uris[path] = uri_of(path)
            files.append(generated(path, config))
        queue += [target for target in targets(path) if target not in uris and target not in queue]
    for svg in [path for path in uris if path.suffix == ".svg"]:
        for scheme, style in (("-light", ""), ("-dark", r"\1")):
            content = DARK_STYLE.sub(style, (ROOT / svg).read_text())
            uris[svg.with_stem(svg.stem + scheme)] = uri = f"{svg.stem}{scheme}.svg"
            files.append(virtual(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    path = next((path for path, uri in uris.items() if uri == page.file.src_uri), None)
    if path is None or path.suffix != ".md":
        return markdown
    if path == Path("docs/settings.md"):
        markdown, page.meta["search"] = settings_as_headings(markdown), {"boost": 2}
    table = "<!-- other names -->\n.*\n<!-- end of other names -->"
    markdown = re.sub(table, lambda _: names_table(), markdown, flags=re.DOTALL)
    parts = FENCE.split(markdown)
    parts[::2] = [with_links(text, path) for text in parts[::2]]
    return "".join(parts)


def targets(path: Path) -> Iterator[Path]:
    """Yield the files and directories of the repository to which a Markdown file links, or the files of a directory."""
    if (ROOT / path).is_dir():
        yield from listed(path) if len(listed(path)) <= MAX_LISTED else ()
    elif path.suffix == ".md":
        for target, _ in LINK.findall(FENCE.sub("", (ROOT / path).read_text())):
            found = (ROOT / path.parent / target).resolve()
            if found.exists():
                yield found.relative_to(ROOT)


def listed(directory: Path) -> list[Path]:
    paths = sorted((ROOT / directory).rglob("*"))
    return [path.relative_to(ROOT) for path in paths if path.is_file() and "__pycache__" not in path.parts]


def uri_of(path: Path) -> str:
    if path == Path("docs/README.md"):
        return "guide.md"
    return str(path) if path.suffix in (".md", ".png") else f"source/{path}.md"


def generated(path: Path, config: Any) -> File:
    """Return the page of a file or directory outside docs/."""
    file, uri = ROOT / path, uris[path]
    if path.suffix == ".png":
        return virtual(config, uri, abs_src_path=str(file))
    if path.suffix == ".md":
        return virtual(config, uri, content=file.read_text())
    head = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
    if not file.is_dir():
        fence = "`" * 12  # longer than any in the file
        code = f"{fence}{LANGUAGES.get(path.suffix, '')}\n{file.read_text()}\n{fence}\n"
        return virtual(config, uri, content=head + code)
    lines = [f"- `{each}`" for each in listed(path)]
    if len(lines) <= MAX_LISTED:
        lines = [f"- [{each}]({os.path.relpath(uri_of(each), Path(uri).parent)})" for each in listed(path)]
    return virtual(config, uri, content=head + "\n".join(lines) + "\n")


def virtual(config: Any, uri: str, **source: Any) -> File:
    from mkdocs.structure.files import File

    return File.generated(config, uri, **source)


def with_links(text: str, path: Path) -> str:
    """Return text of a file with the links of the site."""
    here = Path(uris[path]).parent

    def link(match: re.Match[str]) -> str:
        target = (ROOT / path.parent / match[1]).resolve().relative_to(ROOT)
        return f"]({os.path.relpath(uris[target], here)}{match[2] or ''})"

    def picture(match: re.Match[str]) -> str:
        alt, stem, ending = match.groups()
        dark = (ROOT / path.parent / f"{stem}-dark.{ending}").exists()
        if not dark and ending == "png":
            return match[0]
        light = "-light" if ending == "svg" else ""
        return f"![{alt}]({stem}{light}.{ending}#only-light) ![{alt}]({stem}-dark.{ending}#only-dark)"

    def setting(match: re.Match[str]) -> str:
        page = os.path.relpath("settings.md", here)
        return f"[{match[0]}]({page}#{match[1]})" if match[1] in settings else match[0]

    text = LINK.sub(link, PICTURE.sub(picture, text))
    return "\n".join(line if line.startswith("#") else SPAN.sub(setting, line) for line in text.split("\n"))


def settings_as_headings(markdown: str) -> str:
    """Write a heading for each row: the name and the first words of the description, by which the search finds it."""

    def heading(row: re.Match[str]) -> str:
        name, kind, default, about = (cell.replace("\\|", "|") for cell in row.groups())
        default = default if default == "required" else f"default {default}"
        first, mark, rest = re.fullmatch(r"(.*?)(?:([;:] | \()(.*))?", about).groups(default="")
        further = f"({rest}" if mark == " (" else rest
        return f'### `{name}` {first} {{ #{name} data-toc-label="{name}" }}\n\n{further}\n\n{kind}, {default}\n'

    return ROW.sub(heading, TABLE_HEAD.sub("", markdown))


def names_table() -> str:
    """Return the table of other trainers' names, by the setting here."""
    names: dict[str, list[str]] = {}
    for name, ours in load._ALIASES.items():
        names.setdefault(ours, []).append(f"`{name}`")
    lines = ["| setting here | names in other trainers |", "|---|---|"]
    for ours, others in names.items():
        setting, _, note = ours.partition(" (")
        shown = " and ".join(f"`{name}`" for name in setting.split(" and ")) + (f" ({note}" if note else "")
        lines.append(f"| {shown} | {', '.join(sorted(others))} |")
    return "\n".join(lines)
