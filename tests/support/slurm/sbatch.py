"""Splits a script's #SBATCH lines into words as sbatch does (`_get_argument` of Slurm 22.05)."""


def words(script: str) -> list[str]:
    """Return the words of lines before the first command. Raises ValueError if sbatch would reject the script."""
    found = []
    for line in script.split("\n"):
        if not line.startswith("#"):
            break
        if "\r" in line:
            raise ValueError("DOS line break")
        if line.startswith("#SBATCH"):
            found += _words(line.removeprefix("#SBATCH"))
    return found


def _words(line: str) -> list[str]:
    found, word, quote, escaped = [], None, "", False
    for c in line:
        if escaped:
            word, escaped = (word or "") + c, False
        elif c == "\\":
            escaped = True
        elif quote and c == quote:
            quote = ""
        elif not quote and c in "\"'":
            word, quote = word or "", c
        elif not quote and c == "#":
            break
        elif not quote and c in " \t\v\f":
            found += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + c
    if quote:
        raise ValueError("unmatched quote")
    return found if word is None else [*found, word]
