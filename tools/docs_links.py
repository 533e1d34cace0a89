"""Hook of mkdocs.yml: show links to files of the repository as paths, because the site contains only docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return LINK.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, target = link.groups()
    path = (ROOT / "docs" / target.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
