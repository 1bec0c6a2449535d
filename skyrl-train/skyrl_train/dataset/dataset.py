"""Prompts from files or the hub, as rows that a generator takes. Knows no batches and no epochs."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
from loguru import logger

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_train.errors import DataError
from skyrl_train.types import ConversationType, MessageType, PromptRow
from skyrl_train.utils.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
PromptItem = tuple[ConversationType, str | None, Row, str]
"""Messages, environment id (None: the default one), the row's other columns, uid."""

FILE_SUFFIXES = (".parquet", ".json", ".jsonl")
_CHUNK_ROWS = 512


class PromptDataset:
    """Rows of one or several sources, prompts over the length limit dropped.

    A row has a `prompt` (chat messages), may have an `env_class`, and what else it has goes to the environment. Its uid
    is its index here, as text: the same in every run with the same sources, tokenizer and limit.

    Args:
        datasets: `.parquet`, `.json` or `.jsonl` files, or datasets of the hub: `name` (split `train`) or `name:split`.
        tokenizer: decides, with the chat template and its generation prompt, how long a prompt is.
        max_prompt_length: the most tokens of a prompt.
        num_workers: threads that tokenize. (No processes: forking beside Ray's or a tokenizer's threads may deadlock.)
        chat_template: the one that the run generates with (`configured_chat_template`); None: the tokenizer's own.

    Raises:
        DataError: a source that cannot be read, a missing column, a prompt that is not a list of messages or that the
            template cannot render, no row left.
    """

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or ChatTemplate(tokenizer)
        self.max_prompt_length = max_prompt_length
        self.num_workers = max(1, num_workers)
        self.prompt_key = prompt_key
        self.env_class_key = env_class_key
        self.sources = [datasets] if isinstance(datasets, str) else list(datasets)
        if not self.sources:
            raise DataError("there is no dataset to read; set data.train_data (or data.val_data) to a list of files")
        rows = [row for source in self.sources for row in self._read(source)]
        self.rows = self._short_enough(rows)
        if not self.rows:
            raise DataError(
                f"no row of {', '.join(self.sources)} is left: all {len(rows)} prompts have more than "
                f"trainer.max_prompt_length={max_prompt_length} tokens"
            )

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

    def _read(self, source: str) -> list[Row]:
        rows = read_source(source)
        for number, row in enumerate(rows):
            if self.prompt_key not in row:
                raise DataError(
                    f"{source}: row {number} has no column {self.prompt_key!r}; it has {', '.join(row) or 'none'}"
                )
            row[self.prompt_key] = checked_messages(row[self.prompt_key], f"{source}: row {number}: {self.prompt_key}")
        return rows

    def _short_enough(self, rows: list[Row]) -> list[Row]:
        chunks = [rows[start : start + _CHUNK_ROWS] for start in range(0, len(rows), _CHUNK_ROWS)]
        lengths: list[int] = []
        with (
            ThreadPoolExecutor(self.num_workers) as threads,
            progress.phase("measure the prompts", len(rows), "prompts") as phase,
        ):
            for own in threads.map(self._prompt_lengths, chunks):
                lengths += own
                phase.advance(len(own))
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= self.max_prompt_length]
        logger.info(
            "{}: {} prompts, {} dropped for being over {} tokens (the longest has {})",
            ", ".join(self.sources), len(kept), len(rows) - len(kept), self.max_prompt_length, max(lengths, default=0),
        )  # fmt: skip
        return kept

    def _prompt_lengths(self, rows: list[Row]) -> list[int]:
        try:
            texts = [self.chat_template.text(row[self.prompt_key], add_generation_prompt=True) for row in rows]
        except ChatTemplateError as error:
            raise DataError(f"a prompt of {', '.join(self.sources)}: {error}") from error
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [len(prompt_ids) for prompt_ids in ids]  # pyright: ignore[reportArgumentType]


def read_source(source: str) -> list[Row]:
    """The rows of a file or of a dataset on the hub. Raises DataError if it cannot be read or has none."""
    if not source.endswith(FILE_SUFFIXES):
        return _read_hub(source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"{source}: there is no such file (looked for {path.absolute()})")
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist() if source.endswith(".parquet") else list(_read_json(path))
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{source}: cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{source}: the file has no rows")
    return rows


def _read_json(path: Path) -> Iterator[Row]:
    """Read the rows of a JSON list, or of one JSON object a line, unchanged: no column is converted to one type."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [_parse_line(line, number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is a {type(row).__name__}, not an object")
        yield row


def _parse_line(line: str, number: int) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error


def _read_hub(source: str) -> list[Row]:
    """`name` or `name:split`."""
    import datasets  # heavy, and only needed here
    from datasets.exceptions import DatasetsError

    name, _, split = source.partition(":")
    split = split or "train"
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"{source}: cannot be loaded as a dataset of the hub ({error}). "
            f"(A file must end with one of {', '.join(FILE_SUFFIXES)}.)"
        ) from error
    if split not in found:
        raise DataError(f"{source}: Split `{split}` not found; the dataset has {', '.join(map(str, found))}")
    return found[split].to_list()  # pyright: ignore


def checked_messages(prompt: Any, where: str) -> ConversationType:
    """`prompt` as chat messages. Raises DataError, which says `where`, if it is something else."""
    if isinstance(prompt, str):
        raise DataError(
            f"{where} is plain text ({prompt[:60]!r}); it must be a list of chat messages: "
            '[{"role": "user", "content": "…"}]'
        )
    is_conversation = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not prompt or not is_conversation or any("role" not in m or "content" not in m for m in prompt):
        raise DataError(f"{where} must be a list of chat messages, each with role and content; got {str(prompt)[:120]}")
    return [_without_empty_columns(message) for message in prompt]


def _without_empty_columns(message: MessageType) -> MessageType:
    """Parquet gives every message every key, None where it had none; chat templates ask whether a key is there."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}
