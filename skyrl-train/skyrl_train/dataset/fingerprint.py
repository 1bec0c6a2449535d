"""Fingerprints of tokenized rows: hashes of everything that determines them."""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skyrl_gym.chat.template import ChatTemplate

_CODE = (
    "skyrl_gym.chat.template",
    "skyrl_gym.chat.turn_ends",
    "skyrl_train.dataset.sources",
    "skyrl_train.dataset.json_list",
)
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def compute_rows_fingerprint(
    content: str, chat: ChatTemplate, settings: Mapping[str, object], code: Sequence[str]
) -> str | None:
    """Compute a hash of everything that determines tokenized rows.

    Args:
        content: hash of the source's content.
        chat: tokenizer, chat template and its variables.
        code: names of the modules that create the rows.

    Returns:
        None if the source code of a custom tokenizer class cannot be read.
    """
    tokenizer: Any = chat.tokenizer
    try:
        files = {inspect.getsourcefile(cls) or "" for cls in (*type(tokenizer).__mro__, type(chat)) if _is_own(cls)}
        files |= {str(sys.modules[name].__file__) for name in (*_CODE, *code)}
        sources = [Path(file).read_bytes() for file in sorted(files)]
    except (OSError, TypeError):  # created at a prompt
        return None
    text = str(chat.chat_template or tokenizer.chat_template)
    parts = {
        "content": content,
        "settings": settings,
        "tokenizer": [type(tokenizer).__qualname__, _get_rules(tokenizer)],
        "template": text,
        "variables": chat.kwargs,
        "day": str(date.today()) if "strftime_now" in text else None,  # such a template writes the current date
        "libraries": {name: version(name) for name in _LIBRARIES},
        "code": [hashlib.sha256(source).hexdigest() for source in sources],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _is_own(cls: type) -> bool:
    """Return True for a class outside of Python and transformers, whose versions do not cover it."""
    return cls.__module__.partition(".")[0] not in ("builtins", "transformers")


def _get_rules(tokenizer: Any) -> object:
    """Return the rules by which a tokenizer processes text."""
    own = [tokenizer.special_tokens_map, getattr(tokenizer, "split_special_tokens", None)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [*own, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]
    text: str = backend.to_str()
    # Padding and truncation precede the tokens; they are settings of the last call, not of the tokenizer.
    return [*own, hashlib.sha256(text[max(0, text.find('"added_tokens"')) :].encode()).hexdigest()]
