"""Common functions of the dataset builders: problems from files or the hub in, `train.parquet` and `validation.parquet`
out.

A builder is a function from a problem to a row (`Row`: the columns `prompt` and `env_class`, and what the environment
reads). The rest, options included, is the same for all of them:

    --output_dir DIR            where both files go
    --input PATH ...            local .jsonl, .json (either may be gzipped) or .parquet files, or folders of them
    --hub_train NAME[:CONFIG]@SPLIT[#REVISION], --hub_test ...      datasets of the Hugging Face hub instead
    --validation_share SHARE    hold out this fraction if no file is for validation
    --max_train_dataset_length N
    --only_validation           write only validation.parquet: an evaluation set

`prepared.json` next to both files holds the source, and the number of rows and a checksum of the content of each file,
independent of library versions. Equal checksums mean equal rows.

A local file belongs to the split that its name holds: train, or test / dev / validation. With --validation_share, files
whose name holds none are read too.
"""

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from skyrl_gym.datasets.hub import load_hub
from skyrl_gym.datasets.problems import MakeRow, Problem, Row, first, texts
from skyrl_gym.error import Error, TaskError
from skyrl_train.errors import DataError

__all__ = ["MakeRow", "Problem", "Row", "build", "first", "hold_out", "make_parser", "read_file", "texts", "write"]

Problems = dict[str, Sequence[Problem]]
"""Problems by split: `train` and `test`. Those of the hub are read lazily."""
Clean = Callable[[list[Row]], list[Row]]
"""Function that filters all rows of a split together, for conditions that depend on other rows."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SPLIT_NAMES = {"train": "train", "test": "test", "dev": "test", "valid": "test"}
"""Words in a file's name -> the split that they stand for."""


def make_parser(
    description: str | None,
    output_dir: str,
    hub: tuple[str | None, str | None],
    validation_share: float | None = None,
) -> argparse.ArgumentParser:
    """The options that builders share; the arguments are the defaults, `hub` those for training and validation."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", "--local_dir", type=Path, default=Path(output_dir), help="folder to write")
    parser.add_argument("--input", type=Path, nargs="+", help="local files or folders instead of the hub")
    parser.add_argument(
        "--hub_train", default=hub[0], help="NAME[:CONFIG]@SPLIT[#REVISION] on the hub; default: %(default)s"
    )
    parser.add_argument("--hub_test", default=hub[1], help="the same for validation; default: %(default)s")
    parser.add_argument(
        "--validation_share", type=float, default=validation_share, help="share to hold out if there is one set only"
    )
    parser.add_argument("--max_train_dataset_length", type=int, help="write only so many training rows")
    parser.add_argument("--only_validation", action="store_true", help="read and write a set to evaluate on, no other")
    return parser


def build(
    options: argparse.Namespace, make_row: MakeRow, columns: Sequence[str], clean: Clean = lambda rows: rows
) -> None:
    """Reads, makes the rows, cleans them, writes. Every problem needs the `columns`; "a|b" means one of them.

    Raises DataError on input that cannot be used.
    """
    local = [path.expanduser() for path in options.input or []]
    hub = (None if options.only_validation else options.hub_train, options.hub_test)
    if options.only_validation and local:
        problems = {"train": [], "test": [row for rows in read_local(local, any_name=True).values() for row in rows]}
    else:
        problems = read_local(local, options.validation_share is not None) if local else read_hub(*hub)
        problems = hold_out(problems, options.validation_share)
    rows = {split: clean(_make_rows(found, split, make_row, columns)) for split, found in problems.items()}
    num_left_out = sum(len(found) - len(rows[split]) for split, found in problems.items())
    if num_left_out:
        print(f"{num_left_out} problems are left out")
    rows["train"] = rows["train"][: options.max_train_dataset_length]
    write(rows, options.output_dir, [str(path) for path in local] or hub, options.only_validation)


def _make_rows(problems: Sequence[Problem], split: str, make_row: MakeRow, columns: Sequence[str]) -> list[Row]:
    rows = []
    for index, problem in enumerate(problems):
        for column in columns:
            if all(problem.get(name) is None for name in column.split("|")):
                names = " or ".join(repr(name) for name in column.split("|"))
                raise DataError(f"{split} problem {index} has no column {names}; its columns are {', '.join(problem)}")
        try:
            row = make_row(problem, split, index)
        except TaskError as failure:
            raise DataError(f"{split} problem {index}: {failure}") from failure
        if row is not None:
            rows.append(row)
    return rows


def write(
    rows: dict[str, list[Row]],
    output_dir: Path,
    sources: Sequence[str | None] = (),
    only_validation: bool = False,
) -> None:
    """Writes both files (or the second) and `prepared.json`. Raises DataError if there is nothing for one of them."""
    output = output_dir.expanduser()
    output.mkdir(parents=True, exist_ok=True)
    files = {"test": "validation"} if only_validation else {"train": "train", "test": "validation"}
    for split in files:
        if not rows[split]:
            raise DataError(f"there are no {split} problems, nothing is written to {output}; see --validation_share")
    prepared: dict[str, Any] = {"sources": [source for source in sources if source]}
    for split, name in files.items():
        path = output / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[split]), path)
        prepared[path.name] = {"rows": len(rows[split]), "checksum": checksum(rows[split])}
        print(f"{len(rows[split])} problems: {path}, checksum {prepared[path.name]['checksum']}")
    (output / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n")


def checksum(rows: Iterable[Row]) -> str:
    """Hash rows (SHA-256, the first 16 hexadecimal digits) by their content as JSON with sorted keys."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


def hold_out(problems: Problems, share: float | None) -> Problems:
    """Divide the only non-empty set into both splits, deterministically. Two non-empty sets stay as they are."""
    full = [split for split in ("train", "test") if len(problems[split])]
    if share is None or len(full) != 1:
        return problems
    if not 0 < share < 1:
        raise DataError(f"--validation_share must be between 0 and 1; got {share}")
    found = problems[full[0]]
    is_held_out = [int((i + 1) * share) > int(i * share) for i in range(len(found))]
    return {
        "train": [problem for problem, held_out in zip(found, is_held_out, strict=True) if not held_out],
        "test": [problem for problem, held_out in zip(found, is_held_out, strict=True) if held_out],
    }


def read_local(paths: Iterable[Path], any_name: bool = False) -> Problems:
    """Read problems from files or folders. With `any_name`, a file without a split in its name is a training file.

    Raises DataError for a file in another format or without a split in its name.
    """
    problems: dict[str, list[Problem]] = {"train": [], "test": []}
    for path in paths:
        found = [file for file in _files(path) if path.is_file() or any_name or split_of(file) is not None]
        if not found:
            raise DataError(f"--input {path}: no train.* or test.* with one of the endings {', '.join(SUFFIXES)}")
        for file in found:
            split = split_of(file) or ("train" if any_name else None)
            if split is None:
                raise DataError(f"--input {file}: the name must hold train, test or validation, to tell which it is")
            problems[split] += read_file(file)
    return {**problems}


def read_hub(train: str | None, test: str | None) -> Problems:
    """Problems from the Hugging Face hub. Raises DataError if neither is named."""
    if train is None and test is None:
        raise DataError("there is no dataset to read: give --input, or --hub_train and --hub_test")
    return {"train": _read_hub(train), "test": _read_hub(test)}


def _read_hub(name: str | None) -> Sequence[Problem]:
    try:
        return [] if name is None else load_hub(name)
    except Error as failure:
        raise DataError(f"{failure} (--input)") from failure


def split_of(path: Path) -> str | None:
    """The split that a file's name holds, or that one of the two folders above is called."""
    for name, split in SPLIT_NAMES.items():
        if name in path.name.lower() or name in (parent.name.lower() for parent in path.parents[:2]):
            return split
    return None


def read_file(path: Path) -> list[Problem]:
    """The rows of one file: objects in a list or one a line, or a single one. Raises DataError on anything else."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    try:
        rows = json.loads(text)  # one value; files named .json may also hold a value a line
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as failure:
            raise DataError(f"{path} is not JSON: {failure}") from failure
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must hold a list of JSON objects, or one JSON object a line")
    return rows


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"--input {path}: no such file or folder")
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in candidates if file.name.endswith(SUFFIXES)]
