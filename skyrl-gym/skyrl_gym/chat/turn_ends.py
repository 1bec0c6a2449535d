"""Ends of a turn: the tokens at which an answer is complete. One definition for conversations, agents, filters,
supervised training and what engines are asked to stop at.

`tokenizer.eos_token` alone is not enough: turns of Gemma end with `<end_of_turn>` and its end-of-sequence token is
`<eos>`; Phi, and base models with a ChatML template, are alike.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TurnEnds:
    """Ends of a model's turns.

    Example: `TurnEnds({"<eos>": 1, "<end_of_turn>": 106}, frozenset({1, 106}), frozenset({1}), "<end_of_turn>")`
    """

    tokens: Mapping[str, int]
    """Token -> id of each of `ids` that the tokenizer has a name for."""
    ids: frozenset[int]
    """The tokenizer's end-of-sequence id, those of `generation_config.json` and `config.json`, and that of the token
    which the chat template writes after an answer."""
    declared: frozenset[int]
    """The ids that every engine stops at: the tokenizer's, and those of `generation_config.json` (of `config.json`
    where that file names none)."""
    closing: str = ""
    """Text that the template writes to close the last answer of a conversation. Empty where the next header does it."""
    closing_of_earlier: str = ""
    """Token in place of `closing` after an answer that a message follows: `<|end|>` of gpt-oss, where `closing` is
    `<|return|>`. No end of a turn: the model also writes it after its thoughts."""

    @cached_property
    def _texts(self) -> list[str]:
        return sorted({*self.tokens, self.closing} - {""}, key=len, reverse=True)

    def are_in(self, ids: Sequence[int]) -> bool:
        """Return whether an answer with these ids is complete."""
        return len(ids) > 0 and ids[-1] in self.ids

    def strip(self, text: str) -> str:
        """Remove the end of a turn from the end of a text."""
        return next((text.removesuffix(end) for end in self._texts if text.endswith(end)), text)

    def find_last(self, text: str, start: int) -> int | None:
        """Return the position after the last end of a turn in `text[start:]`; None without one."""
        places = ((text.rfind(end, start), end) for end in self._texts)
        return max((place + len(end) for place, end in places if place >= 0), default=None)

    def find_declared(self, text: str) -> str:
        """Return the declared end that `text` begins with; empty without one."""
        return _find_first_token(text, {token: id for token, id in self.tokens.items() if id in self.declared})

    def count_leading_characters(self, text: str, last_id: int | None) -> int:
        """Count the characters at the start of `text` that close the turn before it.

        Args:
            text: what the template writes after an answer that another message follows.
            last_id: last token of the answer. It matters where the next header closes a turn: only that same header
                has been written already.
        """
        space = len(text) - len(text.lstrip())
        rest = text[space:]
        for closing in (self.closing, self.closing_of_earlier):
            if closing and rest.startswith(closing):
                return space + len(closing)
        header = "" if self.closing else _find_first_token(rest, self.tokens)
        return space + len(header) if header and self.tokens[header] == last_id else 0

    def add_stop_ids(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling parameters that also stop at the end that only the chat template knows."""
        given = list(params.get("stop_token_ids") or [])
        missing = sorted(self.ids - self.declared - {*given})
        if not missing or params.get("ignore_eos"):
            return dict(params)
        return {**params, "stop_token_ids": [*given, *missing]}


def find_turn_ends(tokenizer: Any, last: str = "", followed: str = "") -> TurnEnds:
    """Find the ends of a model's turns.

    Args:
        last: what the chat template writes after an answer that nothing follows.
        followed: what it writes after an answer that a user's message follows.
    """
    added = {str(token): id for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    eos: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    added |= {str(tokenizer.eos_token): id for id in eos}
    model = str(getattr(tokenizer, "name_or_path", ""))
    of_generation, of_config = (_read_ids(model, name) for name in ("generation_config.json", "config.json"))
    declared = frozenset(eos | (of_generation or of_config))

    def ends(written: str = "", closing: str = "", closing_of_earlier: str = "") -> TurnEnds:
        ids = declared | of_config | ({added[written]} if written else set())
        tokens = {token: id for token, id in added.items() if id in ids}
        return TurnEnds(tokens, ids, declared, closing, closing_of_earlier)

    last, followed, closing = last.strip(), followed.strip(), ""
    while token := _find_first_token(last[len(closing) :], added):  # Command-R: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>
        closing += token
    if closing:
        end = next(token for token in sorted(added, key=len, reverse=True) if closing.endswith(token))
        return ends(end, closing, "" if followed.startswith(closing) else _find_first_token(followed, added))
    if last and followed.startswith(last):  # text, which the tokenizer has no token for
        return ends(closing=last)
    return ends(_find_first_token(followed, added))


def _find_first_token(text: str, tokens: Mapping[str, int]) -> str:
    """Return the longest of the tokens that `text` begins with; empty without one."""
    return max((token for token in tokens if text.startswith(token)), key=len, default="")


def _read_ids(model: str, name: str) -> set[int]:
    """Return the end-of-sequence ids in a JSON file of a model: of a folder, or of the hub's cache on this machine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if (path := _find_file(model, name)) else {}
    except (OSError, ValueError):
        return set()
    ids: set[int] = set()
    for section in (content, content.get("text_config")) if isinstance(content, dict) else ():
        named = section.get("eos_token_id") if isinstance(section, dict) else None
        ids |= {id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int)}
    return ids


def _find_file(model: str, name: str) -> Path | None:
    if not model:
        return None
    if Path(model).is_dir():
        return path if (path := Path(model) / name).is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, name)
    except HFValidationError:  # a path that is no folder here
        return None
    return Path(found) if isinstance(found, str) else None
