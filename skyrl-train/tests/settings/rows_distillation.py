"""Rows of `trainer.distillation`."""

from typing import Any

from effects import Row, error, weights

NAME = "trainer.distillation"
TEACHER: dict[str, Any] = {f"{NAME}.teachers": {"main": {"model": "{other_model}"}}}
TOP_K = TEACHER | {f"{NAME}.tokens": "top_k", f"{NAME}.top_k": 8}

ROWS = [
    Row(
        f"{NAME}.teachers",
        {"main": {"model": "{other_model}"}},
        weights(),
        {f"{NAME}.teachers": {"main": {"model": "{model}"}}},
    ),
    Row(f"{NAME}.tokens", "full", weights(), TEACHER),
    Row(f"{NAME}.kl", "forward", weights(), TOP_K),
    Row(f"{NAME}.top_k", 2, weights(), TOP_K),
    Row(f"{NAME}.coef", 2.0, weights(), TEACHER | {f"{NAME}.reward_coef": 1.0}),
    Row(f"{NAME}.reward_coef", 1.0, weights(), TEACHER),
    Row(f"{NAME}.memory_gb", 1e-9, error, TOP_K),
]
