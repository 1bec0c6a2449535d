"""Every setting of the reference page changes something that can be seen: one row a setting, in `rows_*.py`."""

import json
import re
from typing import Any

import pytest
import rows_algorithm
import rows_deepspeed
import rows_distillation
import rows_generator
import rows_harness
import rows_megatron
import rows_trainer
from effects import All, Bench, OneChoice, Row

from skyrl_train.config.document import render_page
from skyrl_train.errors import ConfigError

ROWS = [
    *rows_trainer.ROWS,
    *rows_algorithm.ROWS,
    *rows_generator.ROWS,
    *rows_harness.ROWS,
    *rows_megatron.ROWS,
    *rows_deepspeed.ROWS,
    *rows_distillation.ROWS,
]


# Settings that are seen in a whole run, and most of which have tests of their own besides. The critic's backend,
# optimizer and adapters are the policy's with other settings: one of each section is tried daily.
SLOW = re.compile(
    r"trainer\.critic\.(fsdp_config|model\.lora|optimizer_config|megatron_config)\.(?!cpu_offload|rank|lr|context)"
    r"|trainer\.(critic|ref)\.sequence_parallel_size"
    r"|trainer\.(algorithm\.\w+|distillation|fully_async|ref\.(megatron|fsdp)_config)\.|trainer\.ref\.model_config"
    r"|trainer\.algorithm\.(value_|clip_ratio|use_tis|tis_|zero_variance_filter_tol|max_|lambd|gamma|first_ratio|kl_est)"
    r"|trainer\.(num_logger_|policy\.torch_profiler_config|policy\.sequence_parallel_size|policy\.megatron_config|eval_|update_|resume_|print_example|ckpt_)"
    r"|trainer\.(max_|dump_|export_path|epochs|critic_mini|critic\.model|micro_)"
    r"|data\.|generator\.(?!sampling_params|max_turns|n_samples)"
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.setting, marks=[pytest.mark.slow] if SLOW.match(row.setting) else [])
        for row in ROWS
        if isinstance(row, Row)
    ],
)
def test_setting_has_effect(bench: Bench, row: Row) -> None:
    given = {**row.given, row.setting: row.value}
    before, after = (comparable(row.see(bench, settings)) for settings in (row.given, given))
    assert all(b != a for b, a in zip(before, after, strict=True)), (
        f"{row.setting}={row.value!r} changes nothing where it must"
    )


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, OneChoice)], ids=lambda row: row.setting)
def test_single_choice_setting_rejects_others(bench: Bench, row: OneChoice) -> None:
    with pytest.raises(ConfigError, match=row.setting):
        bench.config({row.setting: row.value})


def test_settings_have_exactly_one_row() -> None:
    """A new setting brings its proof. (Sections of single environments are skyrl_gym's.)"""
    supported, _ = render_page().split("## Settings of other releases")
    names = re.findall(r"^\| `([^`]+)` \|", supported, re.MULTILINE)
    assert len(names) > 250
    own = [name for name in names if not re.fullmatch(r"environment\.skyrl_gym\.\w+\.\w+", name)]
    assert sorted(row.setting for row in ROWS) == sorted(own)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Row)], ids=lambda row: row.setting)
def test_row_shows_no_effect_when_setting_is_unchanged(bench: Bench, row: Row) -> None:
    first = comparable(row.see(bench, row.given))
    bench.forget()
    assert comparable(row.see(bench, row.given)) == first


def comparable(seen: Any) -> list[str]:
    """The parts that must change."""
    parts = seen.parts if isinstance(seen, All) else [seen]
    return [json.dumps(part, sort_keys=True, default=repr) for part in parts]
