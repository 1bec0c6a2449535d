"""Seconds and peak memory of a run's start over its data: tokenizing and filtering the rows, and their digest.

    python benchmarks/dataset_starts.py --rows 20000 --tokens 4000 --before 15e50ec

Rows are passages of this repository's documentation, one file of prompts and one of demonstrations; the tokenizer is a
byte-level BPE trained on the same texts, or that of `--tokenizer FOLDER`. Each start is a process of its own: `cold`
with an empty cache, `warm` with what the cold one left, `before` with the code of another commit. Prints a markdown
table, and ends with 1 unless all starts have the same rows.

- A start here: the data set, its digest (for checkpoints and for the record of the run), the first 64 rows.
- Memory is that of the process above what it held before, libraries and tokenizer loaded. "With pages of files" counts
  what it has mapped, too, which the system takes back when memory is short.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

REPOSITORY = Path(__file__).resolve().parents[1]
KINDS = ("prompts", "examples")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 8192
FIRST_ROWS = 64
_SAMPLE_WORDS = 2000


# ---- one start, in a process of its own


def memory(name: str) -> int:
    """Return an entry of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def measure(kind: str, data: str, tokenizer_folder: str, cache: str) -> dict[str, Any]:
    """Return what one start over a file costs, and the digest of its rows."""
    from loguru import logger
    from transformers import AutoTokenizer

    from skyrl_train.config.supervised import SupervisedDataConfig
    from skyrl_train.dataset.dataset import PromptDataset
    from skyrl_train.dataset.supervised import SupervisedDataset
    from skyrl_train.provenance import data_digest

    logger.disable("skyrl_train")
    os.environ["HF_DATASETS_CACHE"] = cache
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer("x")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, with_files = memory("RssAnon"), memory("VmRSS")
    peaks, is_done = [before], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.01):
            peaks.append(memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.monotonic(), time.process_time()
    if kind == "prompts":
        dataset: Any = PromptDataset(data, tokenizer, 10**9)
    else:
        dataset = SupervisedDataset([data], tokenizer, SupervisedDataConfig(max_length=10**9))
    data_digest(dataset)  # for the provenance of checkpoints
    digest = str(data_digest(dataset))  # for the record of the run
    dataset.collate_fn([dataset[index] for index in range(min(FIRST_ROWS, len(dataset)))])
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
    is_done.set()
    watcher.join()
    return {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "peak": max(peaks) - before,
        "peak_with_files": memory("VmHWM") - with_files, "digest": digest,
    }  # fmt: skip


# ---- all of them


def passages() -> list[str]:
    """Return the words of the documentation."""
    return " ".join(path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md"))).split(" ")


def make_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Train a tokenizer on the texts, and write it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_end|>", "<|im_start|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(words)], VOCABULARY, special_tokens=special, show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=special[0], chat_template=TEMPLATE
    ).save_pretrained(folder)


def write_rows(folder: Path, tokenizer_folder: str, words: list[str], num_rows: int, num_tokens: int) -> None:
    """Write a file of each kind, a row of about `num_tokens` tokens a line."""
    from transformers import AutoTokenizer

    sample = AutoTokenizer.from_pretrained(tokenizer_folder)(" ".join(words[:_SAMPLE_WORDS]))
    num_words = round(num_tokens * _SAMPLE_WORDS / len(sample["input_ids"]))
    draw = random.Random(0)

    def passage(share: float) -> str:
        length = round(num_words * share)
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    with open(folder / "prompts.jsonl", "w") as prompts, open(folder / "examples.jsonl", "w") as examples:
        for number in range(num_rows):
            row = {
                "prompt": [{"role": "user", "content": passage(1.0)}],
                "env_class": "x",
                "extra_info": {"index": number},
            }
            prompts.write(json.dumps(row) + "\n")
            turns = [("user", 0.3), ("assistant", 0.7)]
            messages = [{"role": role, "content": passage(share)} for role, share in turns]
            examples.write(json.dumps({"messages": messages}) + "\n")


def start(code: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure one start of the code in a folder."""
    paths = [str(code / package) for package in ("skyrl-train", "skyrl-gym")]
    finished = subprocess.run(
        [sys.executable, __file__, "--measure", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(finished.stdout.splitlines()[-1])


def run(folder: Path, options: argparse.Namespace) -> int:
    words = passages()
    tokenizer = options.tokenizer
    if tokenizer is None:
        tokenizer = str(folder / "tokenizer")
        make_tokenizer(folder / "tokenizer", words)
    write_rows(folder, tokenizer, words, options.rows, options.tokens)
    codes = {"cold": REPOSITORY, "warm": REPOSITORY}
    if options.before:
        tree = subprocess.run(
            ["git", "archive", options.before, "skyrl-train/skyrl_train", "skyrl-gym/skyrl_gym"],
            cwd=REPOSITORY, stdout=subprocess.PIPE, check=True,
        ).stdout  # fmt: skip
        (folder / "before").mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], input=tree, check=True)
        codes = {"before": folder / "before", **codes}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, transformers "
        f"{version('transformers')}, tokenizers {version('tokenizers')}; {options.rows:,} rows of {options.tokens:,} "
        "tokens\n\n| rows | start | seconds | CPU seconds | memory (GB) | with pages of files (GB) | cache (GB) |\n"
        "|---|---|---:|---:|---:|---:|---:|",
        flush=True,
    )
    differ = False
    for kind in options.kinds:
        cache, digests = folder / f"cache-{kind}", set()
        for name, code in codes.items():
            cost = start(code, [kind, str(folder / f"{kind}.jsonl"), tokenizer, str(cache)])
            digests.add(cost["digest"])
            size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
            print(
                f"| {kind} | {name} | {cost['seconds']:.1f} | {cost['cpu_seconds']:.1f} | {cost['peak'] / 1e9:.2f} | "
                f"{cost['peak_with_files'] / 1e9:.2f} | {size / 1e9:.2f} |",
                flush=True,
            )
        differ |= len(digests) != 1
    print("\nStarts have DIFFERENT rows." if differ else "\nAll starts have the same rows.")
    return int(differ)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=4000, help="of a row, about")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokenizer", help="folder of a tokenizer with a chat template; default: one trained here")
    parser.add_argument("--before", metavar="COMMIT", help="also measure the code of a commit")
    parser.add_argument("--directory", default=None, help="for files; default: the system's temporary folder")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        return run(Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
