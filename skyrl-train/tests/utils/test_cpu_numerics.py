"""Rows of a product on a CPU do not depend on the other rows, to the bit, or a warning says that they may."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from skyrl_train.utils.cpu_numerics import warn_if_rows_depend_on_their_number

PROBE = """
from skyrl_train.utils.cpu_numerics import prepare_cpu, warn_if_rows_depend_on_their_number
prepare_cpu()
print(warn_if_rows_depend_on_their_number())
"""


@pytest.mark.parametrize("width", [32, 128, 512, 896])
def test_row_bits_are_independent_of_row_count(width: int):
    x, weight = torch.randn(600, width), torch.randn(width, width)
    expected = F.linear(x[:4], weight)
    for rows in (5, 8, 12, 33, 100, 600):
        assert torch.equal(F.linear(x[:rows], weight)[:4], expected), rows
    assert not warn_if_rows_depend_on_their_number()


def probe(**environment: str) -> tuple[str, str]:
    plain = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    run = subprocess.run([sys.executable, "-c", PROBE], env=plain | environment, capture_output=True, text=True)
    return run.stdout.strip(), run.stderr


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch computes without MKL")
def test_row_count_dependent_kernels_are_reported():
    assert probe() == ("False", "")
    answer, log = probe(MKL_CBWR="COMPATIBLE")
    assert answer == "True" and "MKL_CBWR=" in log and "before Python starts" in log
