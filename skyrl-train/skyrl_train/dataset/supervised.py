"""Demonstrations and preference pairs as token ids, with a mask of what is learnt. Knows no batches and no workers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from loguru import logger

from skyrl_gym.chat.template import ChatTemplate
from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.cache import NUM_THREADS, ArrowRows, RowCache, in_threads
from skyrl_train.dataset.dataset import checked_messages
from skyrl_train.dataset.fingerprint import rows_fingerprint
from skyrl_train.dataset.sources import Chunk, Row, open_source
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.tokenization import ChatFormat, ChatTemplateError
from skyrl_train.types import ConversationType, JsonObject
from skyrl_train.utils.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEVER = np.iinfo(np.int32).max
"""Position of the first token that is learnt, where there is none."""

COLUMNS = {"chat": ("messages",), "preference": ("chosen", "rejected"), "alpaca": ("instruction", "output")}


@dataclass(frozen=True)
class Example:
    """A text as a model reads it: `ids`, and `mask`, 1 on the tokens that are learnt."""

    ids: list[int]
    mask: list[int]

    @property
    def first_learnt(self) -> int:
        """Position of the first token that is learnt behind another token, `NEVER` without one."""
        return self.mask.index(1, 1) if 1 in self.mask[1:] else NEVER


Item = tuple[Example, ...]
"""One example, or two: what was preferred and what was not."""


class SupervisedDataset(Sequence[Item]):
    """Rows of one or several sources as examples, those without anything to learn dropped (and counted in the log).

    Examples of any length are in files of a cache, from where one is read when it is asked for.

    Args:
        sources: as `data.train_data`.
        with_pairs: whether the rows are preference pairs.

    Raises:
        DataError: a source that cannot be read, columns that fit no format, messages that cannot be rendered, nothing
            left, no space for the cache.
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: SupervisedDataConfig,
        *,
        with_pairs: bool = False,
    ) -> None:
        if not sources:
            raise DataError("there is no dataset to read; set data.train_data to a list of files")
        self.sources = list(sources)
        self._config = config
        self._encoder = Encoder(tokenizer, config)
        self._with_pairs = with_pairs
        self._cache = RowCache(config.cache_dir)
        self._fingerprints: list[str | None] = []
        self._rows = ArrowRows.concatenated([self._tokenized(source) for source in self.sources])
        self._places, dropped = self._select()
        described = ", ".join(f"{count} dropped: {why}" for why, count in dropped.items() if count) or "none dropped"
        logger.info("{}: {} examples, {}", ", ".join(sources), len(self), described)
        if not len(self):
            raise DataError(f"no example of {', '.join(sources)} is left ({described})")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]  no slices
        first = int(self._places[index])
        return tuple(self._example(self._rows.row(first + i)) for i in range(1 + self._with_pairs))

    def _example(self, row: pa.RecordBatch) -> Example:
        ids, mask = (row.column(name).flatten().to_numpy()[: self._config.max_length] for name in ("ids", "mask"))
        return Example(ids.tolist(), mask.tolist())

    @staticmethod
    def collate_fn(items: list[Item]) -> list[Item]:
        return items

    def summary(self, name: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """Return JSON values that follow from this dataset, of the cache if they are there."""
        is_known = type(self) is SupervisedDataset and None not in self._fingerprints
        key = f"{self._fingerprints} {self._config.max_length} {self._config.too_long}"
        return self._cache.summary(key if is_known else None, name, compute)

    def _select(self) -> tuple[np.ndarray, dict[str, int]]:
        """Return the place of the first example of each item that is kept, and how many items are not, by reason."""
        size, limit = 1 + self._with_pairs, self._config.max_length
        lengths, first_learnt = (self._rows.column(name).reshape(-1, size) for name in ("length", "first_learnt"))
        # Truncated ones learn up to the limit; those that are dropped for their length count as that alone.
        is_long = (lengths > limit).any(axis=1) & (self._config.too_long == "drop")
        is_empty = ~is_long & (first_learnt >= limit).any(axis=1)
        places = np.flatnonzero(~is_long & ~is_empty) * size
        reasons = {f"over data.max_length={limit} tokens": is_long, "no token to learn": is_empty}
        return places, {why: int(flags.sum()) for why, flags in reasons.items()}

    def _tokenized(self, name: str) -> ArrowRows:
        source = open_source(name)
        content, num_rows = source.digest()
        read = ("format", "train_on")  # limits of length apply to what is in the cache
        settings = {"pairs": self._with_pairs, **{name: getattr(self._config, name) for name in read}}
        code = [ChatFormat.__module__, checked_messages.__module__, __name__]
        fingerprint = rows_fingerprint(content, ChatTemplate(self._encoder.tokenizer), settings, code)
        self._fingerprints.append(fingerprint)

        def build() -> Iterator[pa.RecordBatch]:
            with progress.phase("tokenize the examples", num_rows, "rows") as phase:
                for num_read, batch in in_threads(partial(self._encode, name), source.chunks(), NUM_THREADS):
                    phase.advance(num_read)
                    yield batch

        return self._cache.rows(name, fingerprint, build)

    def _encode(self, source: str, chunk: Chunk) -> tuple[int, pa.RecordBatch]:
        """Return the number of rows, and their examples; those of a pair are neighbours."""
        examples: list[Example] = []
        for number, row in enumerate(chunk.rows, chunk.first_row):
            where = f"{source}: row {number}"
            try:
                examples += [example for item in self._examples(row, where) for example in item]
            except ChatTemplateError as error:
                raise DataError(f"{where}: {error}") from error
        columns = {
            "ids": pa.array([example.ids for example in examples], pa.list_(pa.int32())),
            "mask": pa.array([example.mask for example in examples], pa.list_(pa.uint8())),
            "length": pa.array([len(example.ids) for example in examples], pa.int32()),
            "first_learnt": pa.array([example.first_learnt for example in examples], pa.int32()),
        }
        return len(chunk.rows), pa.RecordBatch.from_pydict(columns)

    def _examples(self, row: Row, where: str) -> list[Item]:
        kind = self._format_of(row, where)
        if kind == "preference":
            prompt = _as_messages(row.get("prompt") or [], "user", f"{where}: prompt")
            chosen, rejected = (
                self._encoder.conversation(
                    [*prompt, *_as_messages(row[name], "assistant", f"{where}: {name}")], None, last_only=True
                )
                for name in COLUMNS["preference"]
            )
            return [(chosen[-1], rejected[-1])]
        if kind == "alpaca":
            question = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
            return [(example,) for example in self._encoder.question_and_answer(question, str(row["output"]))]
        messages = checked_messages(row["messages"], f"{where}: messages")
        return [(example,) for example in self._encoder.conversation(messages, row.get("tools"))]

    def _format_of(self, row: Row, where: str) -> str:
        wanted = COLUMNS if self._config.format == "auto" else {self._config.format: COLUMNS[self._config.format]}
        kind = next((kind for kind, columns in wanted.items() if all(row.get(name) for name in columns)), None)
        if kind is None:
            expected = " or ".join(f"{kind} ({', '.join(columns)})" for kind, columns in wanted.items())
            raise DataError(
                f"{where} has the columns {', '.join(row) or 'none'}; expected {expected}, none of them empty"
            )
        if (kind == "preference") != self._with_pairs:
            other = "main_dpo" if kind == "preference" else "main_sft"
            raise DataError(f"{where} is of format {kind}, which skyrl_train.entrypoints.{other} trains on")
        return kind


class Encoder:
    """Encoder of conversations into training examples, with the tokenizer's chat template.

    Raises:
        ConfigError: a tokenizer that does not tell where its tokens stand in the text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: SupervisedDataConfig) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                "supervised training needs a fast tokenizer, which says where each token stands in the text; "
                f"{type(tokenizer).__name__} is none: save the model with one (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self._train_on = config.train_on

    @cached_property
    def _chat(self) -> ChatFormat:
        return ChatFormat(self.tokenizer)

    def question_and_answer(self, question: str, answer: str) -> list[Example]:
        """A question and its answer: as a conversation, or one after the other for a model without chat template."""
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return self.conversation(messages, None)
        start = len(question) + 2
        text = f"{question}\n\n{answer}{self.tokenizer.eos_token}"
        return [self._example(text, [(0 if self._train_on == "all" else start, len(text))])]

    def conversation(
        self, messages: ConversationType, tools: list[JsonObject] | None, *, last_only: bool = False
    ) -> list[Example]:
        """The examples that a conversation makes: one, or where the template rewrites earlier turns (drops their
        thoughts, say) one for each turn that is learnt, so that each is learnt behind the text that the model will see.
        """
        chat = ChatFormat(self.tokenizer, None, {"tools": tools}) if tools else self._chat
        if self._train_on == "all":
            text = chat.text(messages)
            return [self._example(text, [(0, len(text))])]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only or self._train_on == "last_assistant":
            answers = answers[-1:]
        whole = chat.text(messages[: answers[-1] + 1]) if answers else chat.text(messages)
        spans, alone = [], []
        for i in answers:
            up_to = whole if i == answers[-1] else chat.text(messages[: i + 1])
            start = self._answer_start(chat, messages, i, up_to)
            end = self._answer_end(up_to, start)
            if whole.startswith(up_to[:end]):
                spans.append((start, end))
            else:
                alone.append(self._example(up_to[:end], [(start, end)]))
        last = [self._example(whole[: spans[-1][1]], spans)] if spans else []
        return [*alone, *(last or ([] if alone else [self._example(whole, [])]))]

    def _answer_start(self, chat: ChatFormat, messages: ConversationType, i: int, up_to: str) -> int:
        """Return the position in the text where answer i begins: behind the header that a model continues."""
        before = chat.text(messages[:i], add_generation_prompt=True) if i else ""
        if up_to.startswith(before):
            return len(before)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, up_to, strict=False))
        return sum(1 for _ in same)

    def _answer_end(self, up_to: str, start: int) -> int:
        """Return the position where an answer ends: behind the token that ends a turn. Text of the template after it
        does not train."""
        eos = str(self.tokenizer.eos_token)
        last = up_to.rfind(eos, start)
        return len(up_to) if last < 0 else last + len(eos)

    def _example(self, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        """The ids of a text; the mask is 1 on tokens that lie in a span of characters."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )
        starts, ends = np.fromiter(chain.from_iterable(encoded["offset_mapping"]), np.int64).reshape(-1, 2).T
        own = np.array([*spans, (len(text) + 1, 0)])  # the last is of tokens behind all spans, and has none
        # The first span that ends behind the token's start; spans are left behind for good.
        of_token = np.maximum.accumulate(np.searchsorted(own[:-1, 1], starts, side="right"))
        mask = (own[of_token, 0] <= starts) & (ends <= own[of_token, 1])
        return Example(encoded["input_ids"], mask.astype(int).tolist())  # type: ignore[arg-type]


def _as_messages(value: object, role: str, where: str) -> ConversationType:
    """A text as one message of `role`; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else checked_messages(value, where)
