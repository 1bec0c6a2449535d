"""Demonstrations and preference pairs as token ids with a training mask. Independent of batches and workers."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from loguru import logger

from skyrl_gym.chat.template import ChatTemplate
from skyrl_gym.valid_unicode import replace_lone_surrogates
from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.cache import NUM_THREADS, ArrowRows, RowCache, map_in_threads
from skyrl_train.dataset.dataset import check_messages, check_tokens
from skyrl_train.dataset.fingerprint import compute_rows_fingerprint
from skyrl_train.dataset.sources import Chunk, Row, open_source
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.tokenization import ChatFormat, ChatTemplateError
from skyrl_train.types import ConversationType, JsonObject, MessageType
from skyrl_train.utils.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEVER = np.iinfo(np.int32).max
"""Position of the first trained token if there is none."""

_MARKS = ("skyrl-mark", "mark-skyrl")
"""Responses without a common prefix."""

COLUMNS = {"chat": ("messages",), "preference": ("chosen", "rejected"), "alpaca": ("instruction", "output")}


@dataclass(frozen=True)
class Example:
    """A tokenized text: `ids`, and `mask`, 1 on trained tokens."""

    ids: list[int]
    mask: list[int]

    @property
    def first_learnt(self) -> int:
        """Position of the first trained token that has a predecessor, or `NEVER`."""
        return self.mask.index(1, 1) if 1 in self.mask[1:] else NEVER


Item = tuple[Example, ...]
"""One example, or two: chosen and rejected."""


class SupervisedDataset(Sequence[Item]):
    """Rows of one or several sources as examples. Rows without trained tokens are dropped (and counted in the log).

    Examples of any length are stored in cache files and read on access.

    Args:
        sources: as `data.train_data`.
        with_pairs: whether the rows are preference pairs.

    Raises:
        DataError: an unreadable source, columns that match no format, messages that cannot be rendered, no remaining
            row, no disk space for the cache.
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
            raise DataError("no datasets given; set data.train_data to a list of files")
        self.sources = list(sources)
        self._config = config
        self._encoder = Encoder(tokenizer, config)
        self._with_pairs = with_pairs
        self._cache = RowCache(config.cache_dir)
        self._fingerprints: list[str | None] = []
        self._rows = ArrowRows.concatenated([self._tokenize_source(source) for source in self.sources])
        self._places, dropped = self._filter_items()
        described = ", ".join(f"{count} dropped: {why}" for why, count in dropped.items() if count) or "none dropped"
        logger.info("{}: {} examples, {}", ", ".join(sources), len(self), described)
        if not len(self):
            raise DataError(f"no usable example in {', '.join(sources)} ({described})")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]  no slices
        first = int(self._places[index])
        return tuple(self._build_example(self._rows.row(first + i)) for i in range(1 + self._with_pairs))

    def _build_example(self, row: pa.RecordBatch) -> Example:
        ids, mask = (row.column(name).flatten().to_numpy()[: self._config.max_length] for name in ("ids", "mask"))
        return Example(ids.tolist(), mask.tolist())

    @staticmethod
    def collate_fn(items: list[Item]) -> list[Item]:
        return items

    def summary(self, name: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """Return JSON values derived from this dataset, cached if available."""
        is_known = type(self) is SupervisedDataset and None not in self._fingerprints
        key = f"{self._fingerprints} {self._config.max_length} {self._config.too_long}"
        return self._cache.summary(key if is_known else None, name, compute)

    def _filter_items(self) -> tuple[np.ndarray, dict[str, int]]:
        """Return the index of the first example of each kept item, and the number of dropped items by reason."""
        size, limit = 1 + self._with_pairs, self._config.max_length
        lengths, first_learnt = (self._rows.column(name).reshape(-1, size) for name in ("length", "first_learnt"))
        # Truncated ones train up to the limit; overlong dropped ones count for that reason only.
        is_long = (lengths > limit).any(axis=1) & (self._config.too_long == "drop")
        is_empty = ~is_long & (first_learnt >= limit).any(axis=1)
        reasons = {f"more than data.max_length={limit} tokens": is_long, "no token to train on": is_empty}
        if self._with_pairs:  # their loss is always log 2, without a gradient
            is_same = self._rows.column("difference")[::size] >= limit
            reasons["chosen and rejected are equal"] = ~is_long & ~is_empty & is_same
        places = np.flatnonzero(~np.any([*reasons.values()], axis=0)) * size
        return places, {why: int(flags.sum()) for why, flags in reasons.items()}

    def _tokenize_source(self, name: str) -> ArrowRows:
        source = open_source(name)
        content, num_rows = source.digest()
        read = ("format", "train_on")  # length limits are applied to cached rows
        settings = {"pairs": self._with_pairs, **{name: getattr(self._config, name) for name in read}}
        chat = ChatTemplate(self._encoder.tokenizer)
        settings["ends"] = sorted(chat.turn_ends.ids)  # of files besides the tokenizer's, too
        code = [ChatFormat.__module__, check_messages.__module__, __name__]
        fingerprint = compute_rows_fingerprint(content, chat, settings, code)
        self._fingerprints.append(fingerprint)

        def build() -> Iterator[pa.RecordBatch]:
            with progress.phase("tokenize the examples", num_rows, "rows") as phase:
                for num_read, batch in map_in_threads(partial(self._encode, name), source.chunks(), NUM_THREADS):
                    phase.advance(num_read)
                    yield batch

        return self._cache.rows(name, fingerprint, build)

    def _encode(self, source: str, chunk: Chunk) -> tuple[int, pa.RecordBatch]:
        """Return the number of rows, and their examples; examples of a pair are adjacent."""
        examples: list[Example] = []
        differences: list[int] = []
        for number, row in enumerate(chunk.rows, chunk.first_row):
            where = f"{source}: row {number}"
            try:
                for item in self._encode_row(row, where):
                    examples += item
                    differences += [_find_first_difference(*item) if self._with_pairs else 0] * len(item)
            except ChatTemplateError as error:
                raise DataError(f"{where}: {error}") from error
        columns = {
            "ids": pa.array([example.ids for example in examples], pa.list_(pa.int32())),
            "mask": pa.array([example.mask for example in examples], pa.list_(pa.uint8())),
            "length": pa.array([len(example.ids) for example in examples], pa.int32()),
            "difference": pa.array(differences, pa.int32()),
            "first_learnt": pa.array([example.first_learnt for example in examples], pa.int32()),
        }
        return len(chunk.rows), pa.RecordBatch.from_pydict(columns)

    def _encode_row(self, row: Row, where: str) -> list[Item]:
        kind = self._format_of(row, where)
        if kind == "preference":
            prompt = _to_messages(given, "user", f"{where}: prompt") if (given := row.get("prompt")) else []
            tools = _parse_tools(row.get("tools"), where)
            chosen, rejected = (
                self._encoder.conversation(
                    _merge_with_prompt(prompt, row[name], f"{where}: {name}"), tools, last_only=True
                )
                for name in COLUMNS["preference"]
            )
            return [(chosen[-1], rejected[-1])]
        if kind == "alpaca":
            question = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
            return [(example,) for example in self._encoder.encode_prompt_and_response(question, str(row["output"]))]
        messages = check_messages(row["messages"], f"{where}: messages")
        return [(example,) for example in self._encoder.conversation(messages, _parse_tools(row.get("tools"), where))]

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
            raise DataError(f"{where} has format {kind}; train on it with skyrl_train.entrypoints.{other}")
        return kind


class Encoder:
    """Encoder of conversations into training examples, with the tokenizer's chat template.

    Raises:
        ConfigError: a tokenizer without character offsets of its tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: SupervisedDataConfig) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                "supervised training needs a fast tokenizer, which reports the character offsets of tokens; "
                f"{type(tokenizer).__name__} is not: save the model with a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self._train_on = config.train_on

    @cached_property
    def _leaves_ends_out(self) -> bool:
        """Whether the template writes nothing after the last response."""
        return not self._chat.turn_ends.closing

    @cached_property
    def _chat(self) -> ChatFormat:
        return ChatFormat(self.tokenizer)

    def encode_prompt_and_response(self, question: str, answer: str) -> list[Example]:
        """Encode a prompt and a response: as a conversation, or concatenated for a model without chat template."""
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return self.conversation(messages, None)
        start = len(question) + 2
        text = replace_lone_surrogates(f"{question}\n\n{answer}{self.tokenizer.eos_token}")
        return [self._build_example(text, [(0 if self._train_on == "all" else start, len(text))])]

    def conversation(
        self, messages: ConversationType, tools: list[JsonObject] | None, *, last_only: bool = False
    ) -> list[Example]:
        """Encode a conversation: one example or, if the template later renders earlier turns differently (such as
        without reasoning), one for each run of turns that it only appends. Each response is trained after the text that
        the model will see before it.
        """
        chat = ChatTemplate(self.tokenizer, None, {"tools": tools}) if tools else self._chat
        if self._train_on == "all":
            text = chat.text(messages)
            if messages[-1]["role"] == "assistant" and self._leaves_ends_out:
                text += self._get_missing_end(chat, messages, len(messages) - 1, text)
            return [self._build_example(text, [(0, len(text))])]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only or self._train_on == "last_assistant":
            answers = answers[-1:]
        if not answers:
            return [self._build_example(chat.text(messages), [])]
        stretches: list[tuple[str, list[tuple[int, int]]]] = []
        for i in reversed(answers):
            text, start = self._render_response(chat, messages, i)
            if stretches and stretches[-1][0].startswith(text):
                stretches[-1][1].append((start, len(text)))
            else:
                stretches.append((text, [(start, len(text))]))
        return [self._build_example(text, spans[::-1]) for text, spans in reversed(stretches)]

    def _render_response(self, chat: ChatTemplate, messages: ConversationType, i: int) -> tuple[str, int]:
        """Return the text up to the end of response i, as the model sees it at inference, and the start position of its
        part."""
        header = self._chat.generation_prompt
        before = chat.text(messages[:i], add_generation_prompt=True) if i else ""
        up_to = chat.text(messages[: i + 1])
        missing = self._get_missing_end(chat, messages, i, up_to) if self._leaves_ends_out else ""
        if before and up_to.startswith(before):
            start = len(before)
        else:
            start = self._find_response_start(chat, messages, i, up_to, header)
            if header and before.endswith(header) and up_to[:start].endswith(header):
                # The template renders earlier turns differently after this response: the model sees them as before it.
                up_to, start = before + up_to[start:], len(before)
        end = self._chat.turn_ends.find_last(up_to, start)
        return up_to[:end] if end is not None else up_to + missing, start

    def _find_response_start(
        self, chat: ChatTemplate, messages: ConversationType, i: int, up_to: str, header: str
    ) -> int:
        """Return the position in `up_to` after the header of response i.

        Two markers are rendered instead of the response: their texts agree up to its start. The template may start a
        response with an empty thought after the header; then the last header after the previous message is used.
        """
        shared = _get_common_prefix(
            *(chat.text([*messages[:i], {"role": "assistant", "content": mark}]) for mark in _MARKS)
        )
        said = str(messages[i - 1].get("content") or "").strip() if i else ""
        place = shared.rfind(header) if header else -1
        start = place + len(header)
        is_of_answer = not i or (bool(said) and said in shared[:start] and said not in shared[start:])
        if place < 0 or not is_of_answer:  # (a space before the response is part of its first token)
            start = len(shared.rstrip(" "))
        return len(_get_common_prefix(shared[:start], up_to))

    def _get_missing_end(self, chat: ChatTemplate, messages: ConversationType, i: int, up_to: str) -> str:
        """Return the end of a turn if the template leaves it to the next header: without one, a model would never learn
        to end a response. The header's token if the model's files declare it as an end token (GLM), or the
        end-of-sequence token."""
        role = "tool" if messages[i].get("tool_calls") else "user"
        following = messages[i + 1] if i + 1 < len(messages) else {"role": role, "content": "."}
        try:
            text = chat.text([*messages[: i + 1], following])
        except ChatTemplateError:
            text = ""
        header = self._chat.turn_ends.find_declared(text[len(up_to) :] if text.startswith(up_to) else "")
        return header or str(self.tokenizer.eos_token)

    def _build_example(self, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        """Build an example from a text; the mask is 1 on tokens within a span of characters."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )
        check_tokens(text, len(encoded["input_ids"]), self.tokenizer, "an example")
        starts, ends = np.fromiter(chain.from_iterable(encoded["offset_mapping"]), np.int64).reshape(-1, 2).T
        own = np.array([*spans, (len(text) + 1, 0)])  # the last entry is for tokens after all spans, and has none
        # The first span that ends after the token's start; earlier spans are not needed again.
        of_token = np.maximum.accumulate(np.searchsorted(own[:-1, 1], starts, side="right"))
        mask = (own[of_token, 0] <= starts) & (ends <= own[of_token, 1])
        return Example(encoded["input_ids"], mask.astype(int).tolist())  # type: ignore[arg-type]


def _parse_tools(tools: object, where: str) -> list[JsonObject] | None:
    """Return a row's tool schemas, which may be JSON text. Raises DataError."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{where}: tools is not valid JSON ({error}); got {tools[:60]!r}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools must be a list of schemas, or its JSON text; got {str(tools)[:120]}")
    return tools


def _get_common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _find_first_difference(chosen: Example, rejected: Example) -> int:
    """Return the first position at which the ids differ, or `NEVER`."""
    if chosen.ids == rejected.ids:
        return NEVER
    pairs = zip(chosen.ids, rejected.ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen.ids), len(rejected.ids)))


def _merge_with_prompt(prompt: ConversationType, value: object, where: str) -> ConversationType:
    """Return a conversation that starts with `prompt`. Some datasets give whole conversations in addition to their
    prompt.
    """
    messages = _to_messages(value, "assistant", where)
    has_system, size = messages[0]["role"] == "system", len(prompt)
    if _is_same(messages[:size], prompt) or (has_system and _is_same(messages[1 : 1 + size], prompt)):
        return messages
    user_part = [message for message in prompt if message["role"] != "system"]
    if user_part and _is_same(messages[: len(user_part)], user_part):
        return [*prompt, *messages[len(user_part) :]]
    if prompt and messages[0]["role"] not in ("assistant", "tool"):
        raise DataError(
            f"{where} begins with a message of the {messages[0]['role']} that differs from prompt: give only the "
            "assistant's messages, or the full conversation with the same prompt"
        )
    return [*prompt, *messages]


def _is_same(messages: ConversationType, others: ConversationType) -> bool:
    """Compare messages, ignoring white space around their texts."""

    def stripped(message: MessageType) -> MessageType:
        content = message.get("content")
        return {**message, "content": content.strip() if isinstance(content, str) else content}

    return list(map(stripped, messages)) == list(map(stripped, others))


def _to_messages(value: object, role: str, where: str) -> ConversationType:
    """Convert a text to one message of `role`; messages are unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else check_messages(value, where)
