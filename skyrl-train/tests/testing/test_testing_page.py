"""docs/testing.md: its code runs, its table of rules is that of the kit."""

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils import logging

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train_testing.invariances import INVARIANCES

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"


def test_page_code_runs_with_documented_output(capsys):
    page = PAGE.read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code) == 2
    names: dict[str, Any] = {}
    logging.disable_progress_bar()
    try:
        for block in code:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        logging.enable_progress_bar()
        if "my_better_loss" in PolicyLossRegistry.list_available():
            PolicyLossRegistry.unregister("my_better_loss")
        if dist.is_initialized():
            dist.destroy_process_group()
    [shown] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    printed = capsys.readouterr().out
    for line in shown.splitlines():
        assert line.strip() == "..." or line in printed, printed


def test_page_lists_all_rules():
    rules = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert {name: rules.get(name) for name in INVARIANCES} == {name: rule.rule for name, rule in INVARIANCES.items()}
