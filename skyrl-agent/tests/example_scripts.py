"""Scripts of `examples/agent`, which are no package."""

import importlib.util
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "agent"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    search_path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = search_path
    return module


def written(script: str, output: Path, *arguments: object) -> list[dict]:
    """The rows, of training and then of validation, that a script of the examples writes."""
    parquet = pytest.importorskip("pyarrow.parquet")
    load(EXAMPLES / script).main(["--output_dir", str(output), *map(str, arguments)])
    return [
        row for name in ("train", "validation") for row in parquet.read_table(output / f"{name}.parquet").to_pylist()
    ]
