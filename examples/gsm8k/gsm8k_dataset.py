"""Writes `train.parquet` and `validation.parquet` of GSM8K, in the form that the trainer reads.

    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k                      # from the Hugging Face hub
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input FOLDER       # train.* and test.* there
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input my_train.jsonl.gz my_test.parquet

Local files are .jsonl, .jsonl.gz or .parquet with columns `question` and `answer` (the published solution, which ends
with "#### number"). A file belongs to the split that its name holds: train, or test / validation.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from skyrl_train.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Reason step by step, and write the final number after "#### " on the last line.'

_FINAL_NUMBER = re.compile(r"#### *(-?[0-9][0-9.,]*)")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def final_number(answer: str) -> str:
    """The number after the solution's last `####`, without thousands separators. Raises DataError if there is none."""
    found = _FINAL_NUMBER.findall(answer)
    if not found:
        raise DataError(f'a GSM8K answer must end with "#### number"; got {answer[-80:]!r}')
    return found[-1].replace(",", "").rstrip(".")


def training_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One problem as the trainer reads it."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def read_local(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Problems by split, `train` and `test`, from files or the files of folders.

    Raises DataError on a file of another form, without the two columns, or whose name holds no split.
    """
    problems: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for path in paths:
        found = [file for file in _files(path) if path.is_file() or _split_of(file) is not None]
        if not found:
            raise DataError(f"--input {path}: no train.* or test.* with one of the endings {', '.join(_SUFFIXES)}")
        for file in found:
            split = _split_of(file)
            if split is None:
                raise DataError(f"--input {file}: the name must hold train, test or validation, to tell which it is")
            problems[split] += _read_file(file)
    return problems


def read_hub() -> dict[str, list[dict[str, Any]]]:
    """Problems by split from the Hugging Face hub (about 5 MB)."""
    import datasets  # heavy, and not needed for local files

    loaded = datasets.load_dataset(DATA_SOURCE, "main")
    return {split: loaded[split].to_list() for split in ("train", "test")}


def write_dataset(problems: dict[str, list[dict[str, Any]]], output: Path, max_train: int | None = None) -> None:
    """Writes both files; of the training problems the first `max_train`."""
    output.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train"), ("test", "validation")):
        chosen = problems[split][:max_train] if split == "train" else problems[split]
        rows = [training_row(row["question"], row["answer"], split, index) for index, row in enumerate(chosen)]
        if not rows:
            raise DataError(f"there are no {split} problems: nothing to write to {output / name}.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output / f"{name}.parquet")
        print(f"{len(rows)} problems: {output / name}.parquet")


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"--input {path}: no such file or folder")
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in candidates if file.name.endswith(_SUFFIXES)]


def _split_of(path: Path) -> str | None:
    name = path.name.lower()
    if "train" in name:
        return "train"
    return "test" if "test" in name or "valid" in name else None


def _read_file(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = _json_rows(lines)
    else:
        with path.open(encoding="utf-8") as lines:
            rows = _json_rows(lines)
    for column in ("question", "answer"):
        if rows and column not in rows[0]:
            raise DataError(f"{path} has no column {column!r}; its columns are {', '.join(rows[0])}")
    return rows


def _json_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.strip()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write GSM8K in the form that the trainer reads.")
    parser.add_argument("--output_dir", type=Path, default=Path("~/data/gsm8k"), help="folder to write")
    parser.add_argument("--input", type=Path, nargs="+", help="local files or folders instead of the hub")
    parser.add_argument("--max_train_dataset_length", type=int, help="write only so many training problems")
    arguments = parser.parse_args(argv)
    local = [path.expanduser() for path in arguments.input or []]
    problems = read_local(local) if local else read_hub()
    write_dataset(problems, arguments.output_dir.expanduser(), arguments.max_train_dataset_length)


if __name__ == "__main__":
    main()
