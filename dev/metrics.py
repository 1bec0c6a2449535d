#!/usr/bin/env python3
"""Print the size of each runtime package: lines, files, functions and their lengths. Nothing is imported.

python dev/metrics.py [--root CHECKOUT]
"""

import argparse
import ast
import statistics
from pathlib import Path

PACKAGES = {  # import name: (source, tests), below the root
    "skyrl_gym": ("skyrl-gym/skyrl_gym", "skyrl-gym/tests"),
    "skyrl_train": ("skyrl-train/skyrl_train", "skyrl-train/tests"),
    "skyrl_agent": ("skyrl-agent/skyrl_agent", "skyrl-agent/tests"),
    "tx": ("skyrl-tx/tx", "skyrl-tx/tests"),
}


def read_files(folder: Path) -> list[str]:
    """Read the Python files of a folder without those that a compiler generated."""
    return [path.read_text() for path in sorted(folder.rglob("*.py")) if not path.name.endswith("_pb2.py")]


def count_lines(texts: list[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def measure_functions(texts: list[str]) -> list[int]:
    """Return the number of lines of each function, in ascending order."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args().root
    print("| package | lines of source | lines of tests | files | functions | lines of a function: median, 90 % |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (source, tests) in PACKAGES.items():
        texts = read_files(root / source)
        lengths = measure_functions(texts)
        sizes = f"{statistics.median(lengths):g}, {lengths[len(lengths) * 9 // 10]}"
        lines = f"{count_lines(texts):,} | {count_lines(read_files(root / tests)):,}"
        print(f"| {name} | {lines} | {len(texts)} | {len(lengths):,} | {sizes} |")


if __name__ == "__main__":
    main()
