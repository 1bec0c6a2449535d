"""Demonstrations and preference pairs as token ids, with a mask of what is learnt. Knows no batches and no workers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from loguru import logger

from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.dataset import Row, checked_messages, read_source
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.tokenization import ChatFormat, ChatTemplateError
from skyrl_train.types import ConversationType, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {"chat": ("messages",), "preference": ("chosen", "rejected"), "alpaca": ("instruction", "output")}


@dataclass(frozen=True)
class Example:
    """A text as a model reads it: `ids`, and `mask`, 1 on the tokens that are learnt."""

    ids: list[int]
    mask: list[int]


Item = tuple[Example, ...]
"""One example, or two: what was preferred and what was not."""


class SupervisedDataset:
    """Rows of one or several sources as examples, those without anything to learn dropped (and counted in the log).

    Args:
        sources: as `data.train_data`.
        with_pairs: whether the rows are preference pairs.

    Raises:
        DataError: a source that cannot be read, columns that fit no format, messages that cannot be rendered, nothing
            left.
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
        self._dropped: Counter[str] = Counter()
        self.items: list[Item] = []
        for source in sources:
            for number, row in enumerate(read_source(source)):
                self._add(row, f"{source}: row {number}")
        dropped = ", ".join(f"{count} dropped: {why}" for why, count in self._dropped.items()) or "none dropped"
        logger.info("{}: {} examples, {}", ", ".join(sources), len(self.items), dropped)
        if not self.items:
            raise DataError(f"no example of {', '.join(sources)} is left ({dropped})")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    @staticmethod
    def collate_fn(items: list[Item]) -> list[Item]:
        return items

    def _add(self, row: Row, where: str) -> None:
        try:
            candidates = self._examples(row, where)
        except ChatTemplateError as error:
            raise DataError(f"{where}: {error}") from error
        for item in candidates:
            fitted = tuple(self._fitted(example) for example in item)
            if any(example is None for example in fitted):
                self._dropped[f"over data.max_length={self._config.max_length} tokens"] += 1
            elif any(not any(example.mask[1:]) for example in fitted if example is not None):
                self._dropped["no token to learn"] += 1
            else:
                self.items.append(tuple(example for example in fitted if example is not None))

    def _fitted(self, example: Example) -> Example | None:
        limit = self._config.max_length
        if len(example.ids) <= limit:
            return example
        return Example(example.ids[:limit], example.mask[:limit]) if self._config.too_long == "truncate" else None

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
        self._tokenizer = tokenizer
        self._train_on = config.train_on

    def question_and_answer(self, question: str, answer: str) -> list[Example]:
        """A question and its answer: as a conversation, or one after the other for a model without chat template."""
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return self.conversation(messages, None)
        start = len(question) + 2
        text = f"{question}\n\n{answer}{self._tokenizer.eos_token}"
        return [self._example(text, [(0 if self._train_on == "all" else start, len(text))])]

    def conversation(
        self, messages: ConversationType, tools: list[JsonObject] | None, *, last_only: bool = False
    ) -> list[Example]:
        """The examples that a conversation makes: one, or where the template rewrites earlier turns (drops their
        thoughts, say) one for each turn that is learnt, so that each is learnt behind the text that the model will see.
        """
        chat = ChatFormat(self._tokenizer, None, {"tools": tools} if tools else None)
        if self._train_on == "all":
            text = chat.text(messages)
            return [self._example(text, [(0, len(text))])]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only or self._train_on == "last_assistant":
            answers = answers[-1:]
        whole = chat.text(messages[: answers[-1] + 1]) if answers else chat.text(messages)
        spans, alone = [], []
        for i in answers:
            up_to = chat.text(messages[: i + 1])
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
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, up_to, strict=False))
        return sum(1 for _ in same)

    def _answer_end(self, up_to: str, start: int) -> int:
        """Return the position where an answer ends: behind the token that ends a turn. Text of the template after it
        does not train."""
        eos = str(self._tokenizer.eos_token)
        last = up_to.rfind(eos, start)
        return len(up_to) if last < 0 else last + len(eos)

    def _example(self, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        """The ids of a text; the mask is 1 on tokens that lie in a span of characters."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]  # type: ignore[assignment]
        mask, span = [], 0
        for start, end in offsets:
            while span < len(spans) and start >= spans[span][1]:
                span += 1
            mask.append(int(span < len(spans) and spans[span][0] <= start and end <= spans[span][1]))
        return Example(encoded["input_ids"], mask)  # type: ignore[arg-type]


def _as_messages(value: object, role: str, where: str) -> ConversationType:
    """A text as one message of `role`; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else checked_messages(value, where)
