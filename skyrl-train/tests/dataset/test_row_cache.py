"""Tokenized rows are kept in files: found again if nothing changed that they follow from, read one by one, whole."""

import datetime
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_gym.chat.template import ChatTemplate
from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset import PromptDataset, fingerprint
from skyrl_train.dataset.cache import map_in_threads
from skyrl_train.dataset.sources import FileSource
from skyrl_train.dataset.supervised import Encoder, Example, SupervisedDataset
from skyrl_train.errors import DataError
from skyrl_train.provenance import data_digest, describe_data
from skyrl_train_testing.tiny_models import build_character_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}go {{ more }}{% endif %}"
Read = Callable[..., Any]


def word_tokenizer(words: str = "", template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every word of `words` is a token, any other word one token for each of its letters' number: `?`."""
    vocabulary = {word: index for index, word in enumerate(["?", "</s>", "go", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)


def write(path: Path, contents: list[str]) -> str:
    rows = [
        {"prompt": [{"role": "user", "content": text}], "other": [{"role": "user", "content": "x"}]}
        for text in contents
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(name, tokenizer, limit, **options)` reads prompts through one cache. Returns: their texts."""

    def texts(source: str, tokenizer: Any = None, limit: int = 9, **options: Any) -> list[str]:
        dataset = PromptDataset(
            source, tokenizer or word_tokenizer(), limit, cache_dir=str(tmp_path / "cache"), **options
        )
        return [messages[0]["content"] for messages, _, _, _ in dataset]

    return texts


def was_found(log: list[str]) -> bool:
    """Return True if the last rows came from the cache. Clears the log."""
    (line,) = [line for line in log if " read from the cache " in line or ": tokenized in " in line]
    log.clear()
    return " read from the cache " in line


def test_cache_hit_still_applies_length_limit(tmp_path, read, log):
    source = write(tmp_path / "rows.jsonl", ["a", "b c d", "e f"])
    assert read(source) == ["a", "b c d", "e f"] and not was_found(log)
    (file,) = (tmp_path / "cache").iterdir()
    assert read(source) == ["a", "b c d", "e f"]
    assert f"{source}: 3 tokenized rows read from the cache {file}" in log and was_found(log)
    assert read(source, limit=3) == ["a", "e f"] and was_found(log)


def test_changed_content_with_same_size_and_mtime_is_retokenized(tmp_path, read, log):
    source = write(tmp_path / "rows.jsonl", ["a bcd"])
    assert read(source) == ["a bcd"]
    times = os.stat(source)
    write(tmp_path / "rows.jsonl", ["a b d"])
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    log.clear()
    assert read(source, limit=9) == ["a b d"] and not was_found(log)


SPLIT = pre_tokenizers.Split(" ", "removed")
LONGER = TEMPLATE + " and this"


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"tokenizer": word_tokenizer(template=LONGER)},
        lambda: {"chat_template": ChatTemplate(word_tokenizer(), LONGER)},
        lambda: {"chat_template": ChatTemplate(word_tokenizer(), None, {"more": "words"})},
        lambda: {"tokenizer": letter_tokenizer()},
        lambda: {"prompt_key": "other"},
    ],
    ids=["template of the tokenizer", "configured template", "template variable", "tokenizer", "setting"],
)
def test_changed_input_is_retokenized(tmp_path, read, log, changed):
    """Each change makes another prompt pass the limit."""
    source = write(tmp_path / "rows.jsonl", ["a bc", "a b c"])
    assert read(source, limit=3) == ["a bc"]
    options = changed()
    fresh = PromptDataset(source, options.get("tokenizer") or word_tokenizer(), 99, cache_dir=str(tmp_path / "fresh"),
                          **{k: v for k, v in options.items() if k != "tokenizer"})  # fmt: skip
    log.clear()
    kept = read(source, limit=99, **options)
    assert not was_found(log)
    assert kept == [messages[0]["content"] for messages, _, _, _ in fresh]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("changed", ["library", "code", "day"])
def test_version_code_and_day_change_fingerprint(monkeypatch, changed):
    chat = ChatTemplate(word_tokenizer(template=TEMPLATE + "{{ strftime_now('%d') }}"))
    before = fingerprint.compute_rows_fingerprint("content", chat, {}, [])
    assert fingerprint.compute_rows_fingerprint("content", chat, {}, []) == before
    code: list[str] = []
    if changed == "library":
        monkeypatch.setattr(fingerprint, "version", lambda name: "9.9")
    elif changed == "code":
        code.append(__name__)
    else:
        tomorrow = datetime.date.today() + datetime.timedelta(days=1)
        monkeypatch.setattr(fingerprint, "date", type("date", (), {"today": staticmethod(lambda: tomorrow)}))
    after = fingerprint.compute_rows_fingerprint("content", chat, {}, code)
    assert after != before
    plain = ChatTemplate(word_tokenizer())  # does not write the date
    assert changed != "day" or fingerprint.compute_rows_fingerprint("content", plain, {}, code) == (
        monkeypatch.undo() or fingerprint.compute_rows_fingerprint("content", plain, {}, code)
    )


@pytest.mark.parametrize("setting", [{"train_on": "all"}, {"format": "alpaca"}, {"with_pairs": True}])
def test_changed_settings_are_retokenized(tmp_path, log, setting):
    source = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    row |= {"instruction": "i", "output": "o", "prompt": "q", "chosen": "yes", "rejected": "no"}
    source.write_text(json.dumps(row))

    def examples(cache: str, with_pairs: bool = False, **settings: Any) -> list[Any]:
        settings = {"format": "preference"} if with_pairs else {"format": "chat"} | settings
        config = SupervisedDataConfig(cache_dir=str(tmp_path / cache), **settings)
        return list(SupervisedDataset([str(source)], build_character_tokenizer(), config, with_pairs=with_pairs))

    first = examples("cache")
    assert not was_found(log) and examples("cache") == first and was_found(log)
    fresh = examples("fresh", **setting)
    log.clear()
    assert examples("cache", **setting) == fresh != first and not was_found(log)


def test_limit_of_length_applies_to_cached_examples(tmp_path, log):
    source = tmp_path / "rows.jsonl"
    rows = [{"instruction": "q" * 5, "output": "a" * length} for length in (1, 30)]
    source.write_text("\n".join(map(json.dumps, rows)))

    def lengths(**settings: Any) -> list[int]:
        config = SupervisedDataConfig(cache_dir=str(tmp_path / "cache"), **settings)
        return [len(item[0].ids) for item in SupervisedDataset([str(source)], build_character_tokenizer(), config)]

    short, long = lengths()
    assert lengths(max_length=short) == [short]
    assert lengths(max_length=short, too_long="truncate") == [short, short]
    with pytest.raises(DataError, match=r"no usable example .*2 dropped: no token to train on"):
        lengths(max_length=5, too_long="truncate")  # cut before the answer: nothing to learn
    assert long > short and sum(": tokenized in " in line for line in log) == 1


def test_rows_keep_every_value(tmp_path, read):
    """JSON rows of other keys and types, columns of parquet that Arrow files hold otherwise."""
    prompt = [{"role": "user", "content": "a \u2028 b"}]
    rows = [
        {"prompt": prompt, "x": 1},
        {"prompt": prompt, "x": "1", "y": {"z": [None, 1.5]}},
        {"prompt": prompt, "x": None},
    ]
    for suffix, text in (
        (".json", json.dumps(rows)),
        (".jsonl", "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows)),
    ):
        path = tmp_path / f"rows{suffix}"
        path.write_text(text)
        assert list(PromptDataset(str(path), word_tokenizer(), 9, cache_dir=str(tmp_path)).rows) == rows
    columns = {
        "prompt": pyarrow.array([prompt] * 3),
        "kind": pyarrow.chunked_array([["a", "b"], ["c"]]).dictionary_encode(),
        "time": pyarrow.array([datetime.datetime(2020, 1, 1)] * 3),
        "image": pyarrow.array([b"\0\xff"] * 3),
        "answers": pyarrow.array([["1"], None, []]),
    }
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    dataset = PromptDataset(str(path), word_tokenizer(), 9, cache_dir=str(tmp_path))
    rows = pyarrow.parquet.read_table(path).to_pylist()
    del rows[1]["answers"]  # null
    assert list(dataset.rows) == rows


def test_unwritable_folder_causes_warning(tmp_path, read, log):
    source = write(tmp_path / "rows.jsonl", ["a", "b"])
    (tmp_path / "cache").write_text("a file")
    assert read(source) == ["a", "b"]
    assert any("cannot be written" in line and "data.cache_dir" in line for line in log)


def test_full_disk_error_names_setting_and_leaves_no_file(tmp_path, read, monkeypatch):
    source = write(tmp_path / "rows.jsonl", ["a", "b"])

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        read(source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_damaged_file_is_rewritten(tmp_path, read, log):
    source = write(tmp_path / "rows.jsonl", ["a", "b"])
    read(source)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert read(source) == ["a", "b"]
    assert any("cannot be read and will be rewritten" in line for line in log)
    log.clear()
    assert read(source) == ["a", "b"] and was_found(log)


def test_bad_row_leaves_no_file(tmp_path, read):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}]}) + '\n{"prompt": "text"}')
    with pytest.raises(DataError, match=r"rows\.jsonl: row 1: prompt"):
        read(str(source))
    assert list((tmp_path / "cache").iterdir()) == []


def test_file_changed_during_read_is_not_cached(tmp_path, read, monkeypatch):
    source = write(tmp_path / "rows.jsonl", ["a", "b"])
    digest = FileSource.digest

    def change(self: FileSource) -> Any:
        found = digest(self)
        write(tmp_path / "rows.jsonl", ["c", "d"])
        return found

    monkeypatch.setattr(FileSource, "digest", change)
    with pytest.raises(DataError, match="changed while it was read"):
        read(source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_concurrent_runs_write_single_complete_file(tmp_path, read, monkeypatch):
    source = write(tmp_path / "rows.jsonl", [f"a {number}" for number in range(50)])
    both, text = threading.Barrier(2, timeout=60), ChatTemplate.text
    seen = threading.local()

    def wait(self: ChatTemplate, *args: Any, **options: Any) -> str:
        if not getattr(seen, "waited", False):
            seen.waited = True
            both.wait()  # each is tokenizing, so neither found the other's file
        return text(self, *args, **options)

    monkeypatch.setattr(ChatTemplate, "text", wait)
    found: list[list[str]] = []
    runs = [threading.Thread(target=lambda: found.append(read(source, num_workers=1))) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert found == [[f"a {number}" for number in range(50)]] * 2
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".arrow"]


def test_unfinished_files_are_removed_after_one_day(tmp_path, read):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, age in (("old", 25), ("new", 1)):
        (cache / f".{name}.arrow.00.partial").write_text("x")
        os.utime(cache / f".{name}.arrow.00.partial", (0, time.time() - age * 3600))
    read(write(tmp_path / "rows.jsonl", ["a"]))
    assert [file.name for file in cache.iterdir() if file.suffix == ".partial"] == [".new.arrow.00.partial"]


def test_threads_buffer_few_items_and_keep_order():
    taken, most = 0, 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    for given, number in enumerate(map_in_threads(lambda number: number, items(), 3)):
        assert number == given
        most = max(most, taken - given)
    assert most <= 3 + 2


class Rows:
    """Items in memory."""

    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def collate_fn(self, items: list[Any]) -> list[Any]:
        return items


def items(dataset: PromptDataset) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


class Louder(PromptDataset):
    """Prompts with another environment."""

    def __getitem__(self, index: int) -> Any:
        messages, _, extras, uid = super().__getitem__(index)
        return messages, "loud", extras, uid


def test_cached_data_digest_matches_items(tmp_path, monkeypatch):
    """The digest is in checkpoints: it must not change, with or without a cache."""
    source = write(tmp_path / "rows.jsonl", ["a", "b c d", "e"])

    def prompts(kind: type[PromptDataset] = PromptDataset, limit: int = 9) -> PromptDataset:
        return kind(source, word_tokenizer(), limit, cache_dir=str(tmp_path / "cache"))

    first = data_digest(prompts())
    assert first == data_digest(Rows(items(prompts()))) == data_digest(prompts())
    assert describe_data(prompts()) == "3 rows (0043c491a738)"
    assert describe_data(Rows([(Example([1, 2], [0, 1]),)])) == "1 rows (cdd4c2de6698)"
    assert data_digest(prompts(limit=3)) == data_digest(Rows(items(prompts(limit=3)))) != first
    assert data_digest(prompts(Louder)) == data_digest(Rows(items(prompts(Louder)))) != first
    messages = [[{"role": "user", "content": text}] for text in ("a", "b c d", "e")]
    assert prompts().find_distinct_values("prompt") == messages
    monkeypatch.setattr(PromptDataset, "__getitem__", None)  # no row is read for what is known
    assert data_digest(prompts()) == first and len(prompts().find_distinct_values("prompt")) == 3


def test_span_mask_matches_token_loop():
    """Random texts and spans, tokens of several characters that straddle borders, tokens without any text."""
    random = np.random.default_rng(0)

    class Tokens:
        is_fast = True

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": list(range(len(offsets))), "offset_mapping": offsets}

    encoder = Encoder(Tokens(), SupervisedDataConfig())  # type: ignore[arg-type]
    for _ in range(200):
        borders = sorted(random.integers(0, 30, 12).tolist())
        offsets = list(pairwise(borders))
        if random.random() < 0.3:
            offsets[int(random.integers(len(offsets)))] = (0, 0)
        cuts = sorted(random.choice(31, 2 * int(random.integers(0, 4)), replace=False).tolist())
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))
        mask, span = [], 0
        for start, end in offsets:
            while span < len(spans) and start >= spans[span][1]:
                span += 1
            mask.append(int(span < len(spans) and spans[span][0] <= start and end <= spans[span][1]))
        assert encoder._build_example("x" * 30, spans).mask == mask, (offsets, spans)
