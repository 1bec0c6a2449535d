"""Every estimator against plain float64 loops that follow the formula. What must change nothing (order, padding,
garbage behind the mask, constants of a group) is in `testing/test_invariances.py`, for all that is registered."""

import math
import random
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry, compute_turn_numbers

Rows = list[list[Any]]
NAMES = ["grpo", "rloo", "maxrl", "reinforce++", "reinforce++_baseline", "gae", "turn_grpo", "token_reward"]
CASES = [(0, 9, 7), (1, 17, 40), (2, 3, 1), (3, 40, 300)]
SETTINGS = [(True, 1.0, 1.0), (False, 0.9, 0.95), (True, 0.3, 0.0), (False, 0.0, 0.5), (True, 1.0, 0.7)]


def make_batch(seed: int, num_rows: int, num_tokens: int, scale: float = 1.0) -> dict[str, Any]:
    """Ragged answers of several turns (one without any token), groups of 1 to 4 in any order, rewards on any token."""
    draw = random.Random(seed)
    response, action, rewards, values, index = [], [], [], [], []
    group = 0
    while len(index) < num_rows:
        index += [f"group {group}"] * draw.randint(1, 4)
        group += 1
    index = index[:num_rows]
    draw.shuffle(index)
    for row in range(num_rows):
        length = 0 if row == num_rows - 1 else draw.randint(1, num_tokens)
        is_model, acts = draw.random() < 0.9, []
        for _ in range(length):
            acts.append(float(is_model))
            is_model = is_model if draw.random() < 0.7 else not is_model
        response.append([1.0] * length + [0.0] * (num_tokens - length))
        action.append(acts + [0.0] * (num_tokens - length))
        rewards.append([scale * draw.choice([0.0, 0.0, 1.0, draw.random()]) for _ in range(num_tokens)])
        values.append([scale * draw.gauss(0, 1) for _ in range(num_tokens)])
    return {
        "token_level_rewards": torch.tensor(rewards, dtype=torch.float64),
        "response_mask": torch.tensor(response),
        "action_mask": torch.tensor(action),
        "turns": compute_turn_numbers(torch.tensor(action)),
        "values": torch.tensor(values, dtype=torch.float64),
        "index": index,
    }


def run(name: str, batch: dict[str, Any], by_std: bool = True, gamma: float = 1.0, lambd: float = 1.0) -> Any:
    settings = {"grpo_norm_by_std": by_std, "gamma": gamma, "lambd": lambd, "config": None}
    return AdvantageEstimatorRegistry.get(name)(**batch, **settings)


# ---- the formulas, in plain loops


def by_loops(name: str, batch: dict[str, Any], by_std: bool, gamma: float, lambd: float) -> tuple[Rows, Rows]:
    rewards, response, action, turns, values = (
        batch[key].tolist() for key in ("token_level_rewards", "response_mask", "action_mask", "turns", "values")
    )
    rows, columns = range(len(rewards)), range(len(rewards[0]))
    zeros = [[0.0 for _ in columns] for _ in rows]
    advantages, returns = [list(row) for row in zeros], [list(row) for row in zeros]
    if name == "token_reward":
        kept = [[rewards[b][t] if response[b][t] else 0.0 for t in columns] for b in rows]
        return kept, kept
    if name in ("gae", "reinforce++"):
        for b in rows:
            acting = [t for t in columns if action[b][t]]
            gained = {}
            for i, t in enumerate(acting):
                end = acting[i + 1] if i + 1 < len(acting) else len(columns)
                gained[t] = sum(rewards[b][u] for u in range(t, end) if response[b][u])
            advantage = value_after = 0.0
            for t in reversed(acting):
                value = values[b][t] if name == "gae" else 0.0
                step = gained[t] + gamma * value_after - value
                advantage = step + gamma * (lambd if name == "gae" else 1.0) * advantage
                advantages[b][t], returns[b][t], value_after = advantage, advantage + value, value
        return whitened(advantages, action), returns
    if name == "turn_grpo":
        to_go: dict[tuple[int, int], float] = {}
        for b in rows:
            own = [sum(rewards[b][t] for t in columns if response[b][t] and turns[b][t] == k) for k in columns]
            for t in columns:
                k = turns[b][t]
                if response[b][t]:
                    to_go[b, k] = sum(gamma ** (j - k) * own[j] for j in range(k, len(columns)))
        for (b, k), score in to_go.items():
            peers = [s for (c, j), s in to_go.items() if j == k and batch["index"][c] == batch["index"][b]]
            value = 0.0 if len(peers) == 1 else score - mean(peers)
            for t in columns:
                if response[b][t] and turns[b][t] == k:
                    advantages[b][t] = value / (std(peers) + 1e-6) if by_std else value
                    returns[b][t] = score
        return advantages, returns
    scores = [sum(rewards[b][t] for t in columns if response[b][t]) for b in rows]
    for b in rows:
        peers = [scores[c] for c in rows if batch["index"][c] == batch["index"][b] and any(response[c])]
        if not any(response[b]):
            continue
        others = (sum(peers) - scores[b]) / max(len(peers) - 1, 1)
        baseline = 0.0 if len(peers) == 1 else mean(peers)
        spread = 1.0 if len(peers) == 1 else std(peers)
        value = {
            "grpo": (scores[b] - baseline) / (spread + 1e-6) if by_std else scores[b] - baseline,
            "rloo": scores[b] - others if len(peers) > 1 else 0.0,
            "maxrl": (scores[b] - mean(peers)) / mean(peers) if mean(peers) > 0 else 0.0,
            "reinforce++_baseline": scores[b] - mean(peers),
        }[name]
        mask = action if name == "reinforce++_baseline" else response
        advantages[b] = [value if mask[b][t] else 0.0 for t in columns]
    if name == "reinforce++_baseline":
        return whitened(advantages, action), advantages
    return advantages, advantages


def mean(values: list[Any]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[Any]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / max(len(values) - 1, 1))


def whitened(values: Rows, mask: Rows) -> Rows:
    kept = [v for row, marks in zip(values, mask, strict=True) for v, mark in zip(row, marks, strict=True) if mark]
    if not kept:
        return values
    scale = math.sqrt(std(kept) ** 2 + 1e-8)
    return [
        [(v - mean(kept)) / scale if mark else 0.0 for v, mark in zip(row, marks, strict=True)]
        for row, marks in zip(values, mask, strict=True)
    ]


@pytest.mark.first_case
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimators_agree_with_plain_loops(name, case):
    batch = make_batch(*case)
    for settings in SETTINGS if case[2] < 100 else SETTINGS[1:2]:
        expected = by_loops(name, batch, *settings)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
            given = batch | {key: batch[key].to(dtype) for key in ("token_level_rewards", "values")}
            if dtype == torch.float32:  # the loops are to see the same, rounded numbers
                rounded = given | {key: given[key].double() for key in ("token_level_rewards", "values")}
                expected = by_loops(name, rounded, *settings)
            for value, wanted in zip(run(name, given, *settings), expected, strict=True):
                assert value.dtype == dtype
                close = torch.tensor(wanted, dtype=torch.float64)
                torch.testing.assert_close(value.double(), close, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e15])
@pytest.mark.parametrize("name", ["rloo", "maxrl", "gae", "reinforce++", "reinforce++_baseline", "turn_grpo"])
def test_large_and_small_rewards_are_exact(name, scale):
    """Against the loops, relative to the largest number there is."""
    batch = make_batch(7, 20, 30, scale)
    single = batch | {key: batch[key].float() for key in ("token_level_rewards", "values")}
    rounded = single | {key: single[key].double() for key in ("token_level_rewards", "values")}
    for value, wanted in zip(run(name, single, True, 0.9, 0.9), by_loops(name, rounded, True, 0.9, 0.9), strict=True):
        expected = torch.tensor(wanted, dtype=torch.float64)
        limit = 1e-6 * max(1e-300, float(expected.abs().max()))
        assert float((value.double() - expected).abs().max()) <= limit


@pytest.mark.parametrize("name", NAMES)
def test_empty_masks_give_zero_advantages(name):
    batch = make_batch(8, 4, 6)
    empty = {key: torch.zeros_like(batch[key]) for key in ("response_mask", "action_mask", "turns")}
    for value in run(name, batch | empty):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("name", ["reinforce++", "gae"])
def test_strong_discount_over_long_response_does_not_overflow(name):
    batch = make_batch(9, 4, 2000)
    for gamma in (0.0, 1e-9, 0.01, 0.5, 0.999):
        value, returns = run(name, batch, True, gamma, 1.0)
        assert value.isfinite().all()
        expected = torch.tensor(by_loops(name, batch, True, gamma, 1.0)[1], dtype=torch.float64)
        torch.testing.assert_close(returns, expected, rtol=1e-9, atol=1e-9)
