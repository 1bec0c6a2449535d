"""Facts about the base model, read from its configuration files alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tx.errors import ConfigError

FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""Files that are downloaded from the hub: weights, settings, tokenizer."""
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class BaseModelFacts:
    """Facts about the base model that need no weights."""

    name: str
    """Name of the model in requests."""
    folder: Path
    vocab_size: int
    """Rows of the embedding: token ids are below."""
    max_context: int
    """Tokens of a datum, and of a prompt with its answer."""
    architecture: str
    tied_embeddings: bool
    tokenizer_id: str | None
    """Argument of `AutoTokenizer.from_pretrained` for clients: a hub name or folder; None without a tokenizer."""


def read_base_model(name_or_dir: str) -> BaseModelFacts:
    """Read a local folder, or download a model from the hub and read it.

    Raises:
        ConfigError: the model does not exist, or its files are incomplete.
    """
    folder = Path(name_or_dir).expanduser()
    is_local = folder.is_dir()
    folder = folder.resolve() if is_local else _resolve_folder(name_or_dir)
    config = _read_json(folder / "config.json")
    if not config:
        raise ConfigError(f"base_model must have a readable config.json; {folder} has none")
    text = config.get("text_config") or config
    has_tokenizer = any((folder / f).is_file() for f in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model"))
    return BaseModelFacts(
        name=name_or_dir,
        folder=folder,
        vocab_size=_read_number(text, ("vocab_size",), folder),
        max_context=_read_number(text, _CONTEXT_FIELDS, folder),
        architecture=next(iter(config.get("architectures") or ["unknown"])),
        tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        tokenizer_id=(str(folder) if is_local else name_or_dir) if has_tokenizer else None,
    )


def _resolve_folder(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"base_model must be a folder or a hub name; no folder {name}")
    from huggingface_hub import snapshot_download  # heavy, and needed for names of the hub only

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # a name that is none, no network, no permission: the hub has a type for each
        raise ConfigError(
            f"base_model {name} is not a local folder and could not be downloaded from the hub: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if it is not there or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_number(config: dict[str, Any], fields: tuple[str, ...], folder: Path) -> int:
    for name in fields:
        if isinstance(config.get(name), int):
            return config[name]
    raise ConfigError(f"config.json of {folder} must define {' or '.join(fields)}")
