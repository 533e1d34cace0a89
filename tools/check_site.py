"""Check the built documentation site: `python tools/check_site.py [SITE]` prints broken links and exits with 1.

Every link and picture of a page must lead to a file of the site, and an anchor to an element of its page. Links to
other hosts are not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Collects the anchors of a page, and the targets of its links and pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        target = values.get("href" if tag in ("a", "link") else "src")
        if target:
            self.targets.append(target)


@cache
def page(path: Path) -> Page:
    return Page(path.read_text())


def broken(site: Path) -> Iterator[str]:
    """Yield `PAGE: TARGET: why` for each link that leads nowhere."""
    for path in sorted(site.rglob("*.html")):
        for target in sorted(set(page(path).targets)):
            if why := problem(site, path, target):
                yield f"{path.relative_to(site)}: {target}: {why}"


def problem(site: Path, path: Path, target: str) -> str | None:
    url = urlsplit(target)
    if url.scheme or url.netloc:
        return None
    start = site if url.path.startswith("/") else path.parent
    found = (start / unquote(url.path).lstrip("/")).resolve() if url.path else path
    if found.is_dir():
        found /= "index.html"
    if not found.is_file():
        return "no such file"
    # Material chooses pictures by the anchors #only-light and #only-dark. A page's own anchor may be of its theme.
    if url.fragment and found.suffix == ".html" and unquote(url.fragment) not in page(found).anchors:
        return "no such anchor"
    return None


def main(site: Path) -> int:
    found = list(broken(site))
    pages = len(list(site.rglob("*.html")))
    print("\n".join(found) or f"site: every link and anchor of {pages} pages leads somewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "site"))
