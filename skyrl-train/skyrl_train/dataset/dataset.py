"""Prompts from files or the hub, as rows for a generator. Independent of batches and epochs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from loguru import logger

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_gym.chat.tokenizer_check import loses_text
from skyrl_train.dataset.cache import NUM_THREADS, ArrowRows, RowCache, map_in_threads
from skyrl_train.dataset.fingerprint import compute_rows_fingerprint
from skyrl_train.dataset.sources import LENGTH, Chunk, Row, open_source, rows_of
from skyrl_train.errors import DataError
from skyrl_train.types import ConversationType, JsonObject, MessageType, PromptRow
from skyrl_train.utils.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptItem = tuple[ConversationType, str | None, Row, str]
"""Messages, environment id (None: the default one), the row's other columns, uid."""

_TEXTS_AT_ONCE = 16
"""Prompts passed to the tokenizer together: its result takes some hundred bytes per token."""


class PromptDataset:
    """Rows of one or several sources, without prompts over the length limit.

    A row has a `prompt` (chat messages) and optionally an `env_class`; all other columns are passed to the environment.
    Its uid is its index here, as text: the same in every run with the same sources, tokenizer and limit. Rows and
    prompt lengths are stored in cache files and read on access.

    Args:
        datasets: `.parquet`, `.json` or `.jsonl` files, or datasets of the hub: `name` (split `train`) or `name:split`.
        tokenizer: determines, with the chat template and its generation prompt, the length of a prompt.
        max_prompt_length: maximum number of tokens of a prompt.
        num_workers: tokenizer threads.
        chat_template: the run's template (`get_configured_chat_template`); None: the tokenizer's.
        cache_dir: `data.cache_dir`.

    Raises:
        DataError: an unreadable source, a missing column, a prompt that is not a list of messages or cannot be rendered
            by the template or has no tokens, no remaining row, no disk space for the cache.
    """

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        num_workers: int = NUM_THREADS,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        chat_template: ChatTemplate | None = None,
        cache_dir: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or ChatTemplate(tokenizer)
        self.max_prompt_length = max_prompt_length
        self.num_workers = max(1, num_workers)
        self.prompt_key = prompt_key
        self.env_class_key = env_class_key
        self.sources = [datasets] if isinstance(datasets, str) else list(datasets)
        if not self.sources:
            raise DataError("no datasets given; set data.train_data (or data.val_data) to a list of files")
        self._cache = RowCache(cache_dir)
        self._fingerprints: list[str | None] = []
        rows = ArrowRows.concatenated([self._tokenize_source(source) for source in self.sources])
        lengths = rows.column(LENGTH)
        kept = np.flatnonzero(lengths <= max_prompt_length)
        logger.info(
            "{}: {} prompts, {} dropped because they exceed {} tokens (the longest has {})",
            ", ".join(self.sources), len(kept), len(lengths) - len(kept), max_prompt_length, lengths.max(),
        )  # fmt: skip
        if not len(kept):
            raise DataError(
                f"all {len(lengths)} prompts of {', '.join(self.sources)} exceed "
                f"trainer.max_prompt_length={max_prompt_length} tokens"
            )
        self.rows: Sequence[Row] = PromptRows(rows, kept, prompt_key)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptItem:
        row = self.rows[index]
        extras = {key: value for key, value in row.items() if key not in (self.prompt_key, self.env_class_key)}
        return row[self.prompt_key], row.get(self.env_class_key), extras, str(index % len(self.rows))

    @staticmethod
    def collate_fn(items: list[PromptItem]) -> list[PromptRow]:
        """Convert items to the dicts that `prepare_generator_input` takes."""
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": uid}
            for prompt, env_class, extras, uid in items
        ]

    def summary(self, name: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """Return JSON values derived from this dataset, cached if available."""
        is_known = type(self) is PromptDataset and None not in self._fingerprints
        key = f"{self._fingerprints} {self.max_prompt_length} {self.env_class_key}"
        return self._cache.summary(key if is_known else None, name, compute)

    def find_distinct_values(self, key: str) -> list[Any]:
        """Return the distinct values of a column, None for rows without it."""

        def compute() -> JsonObject:
            return {"values": list({str(value): value for value in (row.get(key) for row in self.rows)}.values())}

        return self.summary(f"{key} values", compute)["values"]

    def _tokenize_source(self, name: str) -> ArrowRows:
        source = open_source(name)
        content, num_rows = source.digest()
        settings = {"kind": "prompts", "prompt_key": self.prompt_key}
        fingerprint = compute_rows_fingerprint(content, self.chat_template, settings, [__name__])
        self._fingerprints.append(fingerprint)

        def build() -> Iterator[pa.RecordBatch]:
            with progress.phase("measure the prompts", num_rows, "prompts") as phase:
                for batch in map_in_threads(partial(self._add_lengths, name), source.chunks(), self.num_workers):
                    phase.advance(batch.num_rows)
                    yield batch

        return self._cache.rows(name, fingerprint, build)

    def _add_lengths(self, source: str, chunk: Chunk) -> pa.RecordBatch:
        """Return the stored rows with the lengths of their prompts."""
        lengths: list[int] = []
        rows = [(f"{source}: row {number}", row) for number, row in enumerate(chunk.rows, chunk.first_row)]
        for start in range(0, len(rows), _TEXTS_AT_ONCE):
            some = rows[start : start + _TEXTS_AT_ONCE]
            texts = [self._render_text(row, where) for where, row in some]
            ids: Any = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            for (where, _), text, prompt_ids in zip(some, texts, ids, strict=True):
                check_tokens(text, len(prompt_ids), self.tokenizer, where)
                lengths.append(len(prompt_ids))
        return chunk.stored.append_column(LENGTH, pa.array(lengths, pa.int32()))

    def _render_text(self, row: Row, where: str) -> str:
        prompt = self._parse_prompt(row, where)
        try:
            return self.chat_template.text(prompt, add_generation_prompt=True)
        except ChatTemplateError as error:
            raise DataError(f"{where}: {self.prompt_key}: {error}") from error

    def _parse_prompt(self, row: Row, where: str) -> ConversationType:
        if self.prompt_key not in row:
            raise DataError(f"{where} has no column {self.prompt_key!r}; it has {', '.join(row) or 'none'}")
        return check_messages(row[self.prompt_key], f"{where}: {self.prompt_key}")


class PromptRows(Sequence[Row]):
    """Rows of files, read on access: changes to a row are lost."""

    def __init__(self, rows: ArrowRows, kept: np.ndarray, prompt_key: str) -> None:
        self._rows, self._kept, self._prompt_key = rows, kept, prompt_key

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride]  no slices
        (row,) = rows_of(self._rows.row(int(self._kept[index])))
        row[self._prompt_key] = check_messages(row[self._prompt_key], self._prompt_key)
        return row


def check_tokens(text: str, num_tokens: int, tokenizer: "PreTrainedTokenizerBase", where: str) -> None:
    """Raise DataError if a text of several words has become at most one token."""
    if loses_text(text, num_tokens):
        raise DataError(
            f"{where}: {type(tokenizer).__name__} turns {text[:60]!r} into {num_tokens} tokens: the tokenizer is not "
            "the model's, or transformers loads it as another class than it was saved as"
        )


def check_messages(prompt: Any, where: str) -> ConversationType:
    """Return `prompt` as chat messages. Raises DataError with `where` if it is invalid."""
    if isinstance(prompt, str):
        raise DataError(
            f"{where} is plain text ({prompt[:60]!r}); it must be a list of chat messages: "
            '[{"role": "user", "content": "…"}]'
        )
    is_conversation = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not prompt or not is_conversation or not all("role" in m and _has_content(m) for m in prompt):
        raise DataError(f"{where} must be a list of chat messages, each with role and content; got {str(prompt)[:120]}")
    return [_remove_empty_fields(message) for message in prompt]


def _has_content(message: MessageType) -> bool:
    return "content" in message or bool(message.get("tool_calls"))


def _remove_empty_fields(message: MessageType) -> MessageType:
    """Remove null fields, as chat templates check for existence. A call's content may be null or missing; templates
    expect the key."""
    present = {key: value for key, value in message.items() if value is not None}
    return present if "content" in present else {**present, "content": None}
