"""Unexpected values, trees of them, and text damaged at random."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**6, 10**9, 10**21, -(10**21), 16**60, 0.0, -0.0, 0.5, 1e-300, 1e300, -1.5,
    float("inf"), float("-inf"), float("nan"), "", " ", "x", "1", "-1", "1e3", "1:30", "true", "null", "~", ".", "/",
    "/dev/null/x", "/proc/self/mem", "/dev/zero", "a\nb", "a\x00b", "\ud800", "\u202e\u200b", "é" * 300, "x" * 100_000,
    "../" * 2000, "%s%n{}{0}", "$(ls)", "json:loads", "json:", ":", "a:b:c", "absent:x", "tests:", "..:..", "..",
    "http://a:99999", "http://[::1", [], [[]], [None], [True], [1, "a"], ["x"] * 1000, {}, {"a": 1}, {1: 2}, {"": {}},
    [[[[[[[[]]]]]]]], {"a": {"b": {"c": {"d": {}}}}}, "2026-13-45", "2026-01-01", "0x10", "010",
]  # fmt: skip


def change_tree(tree: Any, at: random.Random, add: Callable[[dict, random.Random], None] | None = None) -> None:
    """One value, name or section somewhere in the tree; `add` puts a new one into it."""
    parent = key = None
    node = tree
    while isinstance(node, (dict, list)) and node and (parent is None or at.random() < 0.8):
        parent, key = node, at.choice(list(node)) if isinstance(node, dict) else at.randrange(len(node))
        node = parent[key]
    if parent is None:
        return  # nothing to change
    kind = at.randrange(8)
    if kind <= 2:
        parent[key] = deepcopy(at.choice(HOSTILE))
    elif kind <= 5:
        parent[key] = deepcopy(at.choice([value for value in HOSTILE if type(value) is type(node)] or HOSTILE))
    elif kind == 6 and isinstance(parent, dict):
        letters = list(str(key) or "x")
        letters[at.randrange(len(letters))] = at.choice("xyz_.- \x07é")
        parent["".join(letters)] = parent.pop(key)
    elif at.random() < 0.5 and isinstance(parent, dict):
        parent.pop(key)
    elif isinstance(tree, dict) and add is not None:
        add(tree, at)


def change_text(content: bytes, at: random.Random) -> bytes:
    """Bytes flipped, cut, repeated or put in; the whole in another encoding."""
    where = at.randrange(len(content) + 1)
    kind = at.randrange(9)
    if kind == 0:
        return content[:where]
    if kind == 1:
        return content[:where] + bytes([at.randrange(256)]) + content[where + 1 :]
    if kind == 2:
        put = [b"\x00", b"\x1b[2J", b"\t", b"*", b"&a ", b"!!int ", b"<<: ", b"? ", b"\xff", b"\xed\xa0\x80"]
        put += [b"---\n", b"'", b"|"]
        return content[:where] + at.choice(put) + content[where:]
    if kind == 3:
        lines = content.splitlines(keepends=True)
        return b"".join([*lines, at.choice(lines)]) if lines else content
    if kind == 4:
        return content.decode(errors="replace").encode(at.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le"]))
    if kind == 5:
        depth = at.choice([40, 2000, 50_000])
        return content + b"\ndeep: " + b"[" * depth
    if kind == 6:
        levels = b"".join(b"b%d: &b%d [%s]\n" % (n, n, b", ".join([b"*b%d" % (n - 1)] * 9)) for n in range(1, 12))
        return content + b"\nb0: &b0 [x, x]\n" + levels
    if kind == 7:
        return content[where:] + content[:where]
    return content + b"\nlong: " + b"y" * at.choice([10_000, 250_000, 3_000_000])
