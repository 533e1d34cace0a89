"""Computes digests of the files that settings name, so that a resumed run reads the same data and models.

The digests are in RUN/files.json. They depend on content and on names below the setting's path, so run and files may be
moved. Modules of rewards, environments and objectives have no digest: a run is resumed after a reward was corrected,
and one file does not show a change of the modules that it imports.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from dppo_megatron.bank.files import segment_paths
from dppo_megatron.data.files import PromptFileError, data_files

# Of a file of more than 256 MiB, its size, first piece (a header) and the beginnings of 255 other pieces are read.
PIECE, PIECES, SAMPLE = 1 << 20, 256, 1 << 14
_OF_MODELS = (".json", ".jinja", ".txt", ".model", ".safetensors", ".distcp", ".pt")  # others are not read


def contents(setting: str, path: Path) -> dict[str, str]:
    """Return the digest of each file of a setting, by its path relative to that of the setting; empty without files.

    Of a bank, which may still grow, only the index line of the first group is read; it has the group's checksums.
    """
    try:
        if setting == "rollout.bank":
            with (index := segment_paths(path, 0)[1]).open("rb") as lines:
                return {index.name: hashlib.blake2b(line).hexdigest()} if (line := lines.readline()) else {}
        if setting.startswith(("data.", "eval.")):
            files = data_files(path)
        else:
            files = [file for file in path.iterdir() if file.suffix in _OF_MODELS]
        base = path if path.exists() else files[0].parent
        present = [(os.path.relpath(file, base), file, file.stat()) for file in files if file.is_file()]
        return {name: _digest(file, stat.st_size, stat.st_mtime_ns) for name, file, stat in present}
    except (OSError, PromptFileError):  # reported by the checks of data and model
        return {}


@cache
def _digest(file: Path, size: int, _changed_ns: int) -> str:
    digest, step = hashlib.blake2b(b"%d" % size), max(PIECE, size // PIECES)
    with file.open("rb") as opened:
        for place in range(0, size, step):
            opened.seek(place)
            digest.update(opened.read(PIECE if step == PIECE or not place else SAMPLE))
    return digest.hexdigest()
