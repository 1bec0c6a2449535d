"""Tiny models of the table of architectures, divided over two FSDP2 ranks: training, checkpoints and weights for
engines equal those of one rank."""

from collections.abc import Callable

import pytest

from skyrl_train_testing.backend_layouts import BackendRanks, Layout, check_layout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "deepseek_v3" else pytest.mark.full)
        for name in ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_5")
    ],
)
def test_two_fsdp2_ranks_equal_one(ranks: BackendRanks, folder_of: Callable[[str], str], name: str):
    check_layout(ranks, folder_of(name), Layout(2))
