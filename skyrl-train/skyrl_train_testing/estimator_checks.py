"""Invariances of advantage estimators. An estimator runs once a step, over the whole batch: no split concerns it.

Shapes: B sequences, R response columns.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from skyrl_train.algorithms.advantages import compute_turn_numbers
from skyrl_train.config import AlgorithmConfig
from skyrl_train.training_batch import TensorBatch
from skyrl_train_testing.findings import Findings
from skyrl_train_testing.float64 import in_float64
from skyrl_train_testing.variants import fill_masked, iter_variants

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Outputs = dict[str, torch.Tensor]

_MASKS = {"rewards": "response_mask"}
_ALWAYS = "on an ordinary batch"


def check_advantage_estimator(
    estimator: Estimator,
    config: AlgorithmConfig | None = None,
    *,
    name: str | None = None,
    exempt: Mapping[str, str] | None = None,
) -> None:
    """Run every invariance of advantage estimators. One is called with keywords alone, as the trainer does:
    `token_level_rewards`, `response_mask`, `action_mask` [B, R], `index` (B group names), `turns` [B, R], `values` [B,
    R], `config`, `grpo_norm_by_std`, `gamma`, `lambd`; it gives advantages and returns [B, R].

    Which of them hold depends on the estimator: `other_groups` not for one that normalises over the batch,
    `group_constant` not for one without a baseline. Say so in `exempt`.

    Args:
        config: the settings it is run with. None: the defaults.
        name: what to call it in the error. None: the function's own name.
        exempt: invariances that are not meant to hold for this estimator, each with the reason.

    Raises:
        InvarianceError: lists all that is violated, with the numbers.
    """
    config = AlgorithmConfig() if config is None else deepcopy(config)
    config_before = deepcopy(config)
    findings = Findings(f"the advantage estimator {name or getattr(estimator, '__name__', repr(estimator))}", exempt)
    batch, names = make_estimator_batch()
    kept = batch.tensor("response_mask") != 0
    with findings.attempt("form", _ALWAYS):
        expected = _compute_outputs(estimator, batch, names, config)
    if findings.has("form"):
        findings.finish()

    def compare(invariance: str, words: str, outputs: Callable[[], Outputs], kept: torch.Tensor = kept) -> None:
        with findings.attempt(invariance, words):
            for what, value in outputs().items():
                findings.compare(invariance, words, what, expected[what][: len(kept)], value, kept)

    for what, value in expected.items():
        findings.check_finite(_ALWAYS, what, value, kept)
    advantages = expected["the advantage"]
    nothing = torch.zeros_like(advantages)
    findings.compare("masked_output", "outside the response", "the advantage", nothing, advantages, ~kept, absolute=0)
    findings.check_deterministic("twice on the same batch", lambda: _compute_outputs(estimator, batch, names, config))
    _check_inputs(findings, estimator, batch, names, config)
    for variant in iter_variants(batch, _MASKS):
        renamed = [names[row] for row in variant.order.tolist()]
        compare(
            variant.invariance,
            variant.words,
            lambda variant=variant, renamed=renamed: {
                what: variant.back(value)
                for what, value in _compute_outputs(estimator, variant.batch, renamed, config).items()
            },
        )
    for variant in fill_masked(batch, {"values": "action_mask"}):
        words = f"{variant.words} for the critic's values (the action mask)"
        compare(
            "masked_garbage", words, lambda variant=variant: _compute_outputs(estimator, variant.batch, names, config)
        )
    doubles = TensorBatch({name: column.double() for name, column in batch.items() if column is not None})
    compare("float64", "in float64", lambda: in_float64(lambda: _compute_outputs(estimator, doubles, names, config)))
    _check_groups(findings, estimator, batch, names, config, expected, compare)
    with findings.attempt("reward_direction", "with a higher reward"):
        _check_direction(findings, estimator, batch, names, config, advantages)
    if config != config_before:
        findings.add("inputs_unchanged", "the config was changed")
    findings.finish()


def make_estimator_batch() -> tuple[TensorBatch, list[str]]:
    """A batch [12, 8] and the group of each row: groups of 5, 3 (all of the same score), 3 and 1, mixed; several turns,
    with the environment's words between; rewards of 0 and above, at the end and within; a row that does not train."""
    draw = torch.Generator().manual_seed(0)
    size = (12, 8)
    names = ["b", "a", "a", "c", "b", "d", "a", "c", "a", "b", "c", "a"]
    lengths = torch.tensor([8, 6, 8, 3, 5, 7, 4, 8, 2, 6, 8, 1])
    response_mask = (torch.arange(size[1]) < lengths[:, None]).float()
    action_mask = response_mask.clone()
    for row, start, stop in ((1, 2, 4), (2, 3, 4), (2, 5, 7), (5, 3, 5), (7, 0, 2), (7, 4, 6), (10, 4, 8)):
        action_mask[row, start:stop] = 0
    action_mask[9] = 0
    rewards = torch.zeros(size)
    rewards[torch.arange(size[0]), lengths - 1] = torch.rand(size[0], generator=draw).round(decimals=2)
    for row, column, reward in ((1, 1, 0.5), (2, 2, 0.25), (2, 4, 1.0), (5, 2, 0.3), (7, 3, 0.7), (10, 2, 0.1)):
        rewards[row, column] = reward
    for row in (0, 4, 9):
        rewards[row, lengths[row] - 1] = 0.7  # no float32 number: a mean of three such is off by a rounding
    values = torch.where(response_mask != 0, torch.rand(size, generator=draw), 0.0)
    return TensorBatch(rewards=rewards, response_mask=response_mask, action_mask=action_mask, values=values), names


def _compute_outputs(
    estimator: Estimator, batch: TensorBatch, names: Sequence[Hashable], config: AlgorithmConfig
) -> Outputs:
    answer = estimator(**_make_arguments(batch, names, config))
    size = tuple(batch.tensor("rewards").shape)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(f"it must give advantages and returns; got {type(answer).__name__}")
    outputs: Outputs = {"the advantage": answer[0], "the return": answer[1]}
    for what, value in outputs.items():
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != size:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{what} must be a tensor {size}, one number a token; got {got}")
    return outputs


def _make_arguments(batch: TensorBatch, names: Sequence[Hashable], config: AlgorithmConfig) -> dict[str, Any]:
    return dict(
        token_level_rewards=batch.tensor("rewards"),
        response_mask=batch.tensor("response_mask"),
        action_mask=batch.tensor("action_mask"),
        index=list(names),
        turns=compute_turn_numbers(batch.tensor("action_mask")),
        values=batch.tensor("values"),
        config=config,
        grpo_norm_by_std=config.grpo_norm_by_std,
        gamma=config.gamma,
        lambd=config.lambd,
    )


def _check_inputs(
    findings: Findings, estimator: Estimator, batch: TensorBatch, names: Sequence[Hashable], config: AlgorithmConfig
) -> None:
    copy = TensorBatch({name: column.clone() for name, column in batch.items() if column is not None})
    arguments = _make_arguments(copy, names, config)
    versions = {name: value._version for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with findings.attempt("inputs_unchanged", _ALWAYS):
        estimator(**arguments)
    for name, version in versions.items():
        if arguments[name]._version != version:
            findings.add("inputs_unchanged", f"{name} was changed in place")
    if arguments["index"] != list(names):
        findings.add("inputs_unchanged", "index was changed")


def _check_groups(
    findings: Findings,
    estimator: Estimator,
    batch: TensorBatch,
    names: Sequence[str],
    config: AlgorithmConfig,
    expected: Outputs,
    compare: Callable[..., None],
) -> None:
    """Check group names, other groups, constants, rows without a token."""
    mask = batch.tensor("response_mask")
    relabellings: dict[str, Mapping[str, Hashable]] = {
        "numbers that run the other way": {"a": 7, "b": 5, "c": 3, "d": 0},
        "pairs": {"a": ("x", 1), "b": ("x", 0), "c": ("", 2), "d": ("y", 1)},
        "each other's names": {"a": "d", "b": "a", "c": "b", "d": "c"},
    }
    for words, relabelling in relabellings.items():
        renamed = [relabelling[name] for name in names]
        words = f"with groups called by {words}"
        compare("group_names", words, lambda renamed=renamed: _compute_outputs(estimator, batch, renamed, config))
    empty = TensorBatch({name: torch.zeros_like(column[:1]) for name, column in batch.items() if column is not None})
    for group in dict.fromkeys(names):
        rows = torch.tensor([row for row, name in enumerate(names) if name == group])
        with findings.attempt("other_groups", f"group {group} alone"):
            alone = _compute_outputs(estimator, batch.rows(rows), [group] * len(rows), config)
            for what, value in alone.items():
                findings.compare("other_groups", f"group {group} alone", what, expected[what][rows], value, mask[rows])
        words = f"with a row without tokens in group {group}"
        longer = TensorBatch.cat([batch, empty])
        compare(
            "empty_rows",
            words,
            lambda longer=longer, group=group: {
                what: value[:-1] for what, value in _compute_outputs(estimator, longer, [*names, group], config).items()
            },
        )
        if len(rows) == 1:
            continue  # it may have no baseline at all
        raised = batch.tensor("rewards").clone()
        raised[rows, 0] += 2.5  # at the first token: the rewards from the first turn on, and the score, rise by as much
        richer = TensorBatch(dict(batch), rewards=raised)
        words = f"with 2.5 added to the rewards of group {group}"
        with findings.attempt("group_constant", words):
            value = _compute_outputs(estimator, richer, names, config)["the advantage"]
            findings.compare("group_constant", words, "the advantage", expected["the advantage"], value, mask)


def _check_direction(
    findings: Findings,
    estimator: Estimator,
    batch: TensorBatch,
    names: Sequence[str],
    config: AlgorithmConfig,
    advantages: torch.Tensor,
) -> None:
    """Raise the reward of every row's last action token in turn, and compare the advantage there."""
    rises = []
    for row, action in enumerate(batch.tensor("action_mask")):
        if not action.any():
            continue
        token = int(action.nonzero()[-1])
        rewards = batch.tensor("rewards").clone()
        rewards[row, token] += 0.5
        higher = _compute_outputs(estimator, TensorBatch(dict(batch), rewards=rewards), names, config)["the advantage"]
        before, after = advantages[row, token].item(), higher[row, token].item()
        rises.append(after - before)
        if not after >= before - 1e-6:
            findings.add(
                "reward_direction",
                f"0.5 more reward at row {row}, token {token}, the advantage went from {before:.7g} to {after:.7g}",
            )
    if not max(rises) > 1e-6:
        findings.add("reward_direction", "a higher reward changed the advantage of no token that earned it")
