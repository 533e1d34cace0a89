"""Load the tokenizer in a Hugging Face model directory, from local files only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.common.files import LFS_PROBLEM, is_lfs_pointer, read_foreign_json
from dppo_megatron.errors import ExpectedError, bounded, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MAX_TOKENS = 1 << 31
_MAX_LAYERS = 10_000


class TokenizerError(ExpectedError, ValueError):
    """The directory's tokenizer cannot be used; the message names the file and the remedy."""


def load_tokenizer(model_dir: str | Path, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model directory and check it against the model.

    vocab_size: number of embedding rows; by default `vocab_size` in config.json.
    Raises `TokenizerError` if the directory or tokenizer is missing or unreadable, if the tokenizer has more tokens
    than the model has rows, or if no end-of-sequence token is known.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise TokenizerError(f"model.path = {directory}: no such directory; name a local one, nothing is downloaded")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise TokenizerError(f"model.path = {directory}: has no tokenizer ({names}); copy the model's files there")
    for name in TOKENIZER_FILES:
        if (directory / name).is_file() and is_lfs_pointer(directory / name):
            raise TokenizerError(f"model.path = {directory}: {name}: {LFS_PROBLEM}")
    _refuse_endless(directory / "config.json")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        tokenizer.decode(tokenizer("1 + 1", add_special_tokens=True)["input_ids"])  # some damage shows only in use
    except (KeyboardInterrupt, SystemExit):
        raise
    # Damage may raise any Exception; a Rust panic raises a BaseException.
    except BaseException as error:
        reason = f"{type(error).__name__}: {bounded(' '.join(str(error).split()), 500)}"
        if not (directory / TOKENIZER_FILES[0]).exists():  # transformers asks for packages instead
            reason = f"no {TOKENIZER_FILES[0]}; copy the model's there"
        raise TokenizerError(f"model.path = {directory}: its tokenizer cannot be loaded: {reason}") from error
    rows = vocab_size if vocab_size is not None else read_json(directory / "config.json").get("vocab_size")
    if isinstance(rows, int) and len(tokenizer) > rows:
        raise TokenizerError(
            f"model.path = {directory}: the tokenizer has {len(tokenizer)} tokens but the model only {rows} "
            "rows (vocab_size); they do not belong together"
        )
    end_token_ids(directory, tokenizer)
    return tokenizer


def _refuse_endless(path: Path) -> None:
    """Raise `TokenizerError` for a config with too many layers.

    transformers also reads the config and builds a list with a name for each layer, which takes minutes for 10^9
    layers.
    """
    config = read_json(path)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        layers = part.get("num_hidden_layers")
        if isinstance(layers, int) and layers > _MAX_LAYERS:
            raise TokenizerError(f"{path}: num_hidden_layers = {shown(layers)}: more than any model has; correct it")


def end_token_ids(model_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response, ascending: from generation_config.json, else config.json, and the tokenizer.

    Raises `TokenizerError` without such an id.
    """
    directory = Path(model_dir)
    end_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < _MAX_TOKENS]:
                raise TokenizerError(
                    f"{directory / name}: eos_token_id = {shown(wrong[0])}: not a token id; write the id of the token "
                    "that ends a response"
                )
            end_ids.update(ids)
            break
    if tokenizer.eos_token_id is not None:
        end_ids.add(tokenizer.eos_token_id)
    if not end_ids:
        raise TokenizerError(
            f"model.path = {directory}: no end-of-sequence token in generation_config.json, config.json or "
            "the tokenizer; responses would never stop. Set eos_token_id in generation_config.json"
        )
    return tuple(sorted(end_ids))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if the file is missing. Raises `TokenizerError` for other content."""
    try:
        return read_foreign_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
