"""The kit passes everything registered, and catches, by name, every function that is wrong on purpose."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLossRegistry, register_policy_loss
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.config import AlgorithmConfig
from skyrl_train_testing.invariances import (
    INVARIANCES,
    NOT_MEANT_TO_HOLD,
    InvarianceError,
    check_advantage_estimator,
    check_critic_loss,
    check_everything_registered,
    check_kl_estimator,
    check_policy_loss,
    check_reduction,
)


def violated_by(check: Callable[..., None], *args: Any, **settings: Any) -> set[str]:
    with pytest.raises(InvarianceError) as caught:
        check(*args, **settings)
    return set(caught.value.names)


# ---- what is right passes


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(),
        AlgorithmConfig.from_dict(
            {
                "grpo_norm_by_std": False,
                "gamma": 0.9,
                "lambd": 0.8,
                "eps_clip_high": 0.28,
                "dppo": {"divergence": "binary_kl"},
                "decoupled_ppo": {"behavior_weight_cap": 1.1},
            }
        ),
    ],
    ids=["defaults", "other settings"],
)
def test_everything_registered_is_invariant(config: AlgorithmConfig):
    check_everything_registered(config)


@pytest.mark.parametrize("name", [name for name in NOT_MEANT_TO_HOLD if name in AdvantageEstimatorRegistry])
def test_estimator_is_exempt_only_from_rules_it_breaks(name: str):
    assert violated_by(check_advantage_estimator, AdvantageEstimatorRegistry.get(name)) == set(NOT_MEANT_TO_HOLD[name])


def test_dr_grpo_is_excused_only_from_adding_up_to_one():
    dr_grpo = partial(token_weights, reduction="seq_mean_token_sum_norm")
    assert violated_by(check_reduction, dr_grpo) == {"sums_to_one"}


# ---- what is wrong is caught by name


def policy_loss(compute: Callable[[Any], Any]) -> Callable[..., Any]:
    """A policy loss by its name, from a function of what it is given, which may return metrics as well."""

    def loss(log_probs, old, advantages, config, mask, rollout):
        found = compute(SimpleNamespace(log_probs=log_probs, old=old, advantages=advantages, config=config, mask=mask))
        return found if isinstance(found, tuple) else (found, {})

    loss.__name__ = compute.__name__
    return loss


def surrogate(given: Any, **others: torch.Tensor) -> torch.Tensor:
    """The right loss of tokens, with `others` in place of given tensors."""
    given = SimpleNamespace(**(vars(given) | others))
    return -(given.log_probs - given.old).clamp(-20, 20).exp() * given.advantages


def in_mask(given: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.where(given.mask != 0, values, 0.0)


def mask_by_multiplication(given):
    mean_B1 = ((given.log_probs - given.old) * given.mask).sum(-1, keepdim=True)
    mean_B1 = mean_B1 / given.mask.sum(-1, keepdim=True).clamp(min=1)
    return -(mean_B1.detach() + given.log_probs - given.log_probs.detach()).exp() * given.advantages


def sequence_ratio_over_all_columns(given):
    ratios = (given.log_probs - given.old).nan_to_num(posinf=0, neginf=0)
    return -ratios.clamp(-20, 20).mean(-1, keepdim=True).exp() * given.advantages


def advantages_scaled_by_the_micro_batch(given):
    kept = in_mask(given, given.advantages)
    return surrogate(given, advantages=kept / (kept.abs().max() + 1e-6))


def changes_the_config(given):
    given.config.eps_clip_low = 0.3
    return surrogate(given)


@policy_loss
def wrong_sign(given):
    return -surrogate(given)


def pair_loss(log_probs, old, advantages, config, mask, rollout):
    scores = torch.where(mask != 0, log_probs - old, 0.0).sum(-1)
    first, second = scores.unflatten(0, (-1, 2)).unbind(-1)
    loss = -torch.nn.functional.logsigmoid(first - second)
    return loss.repeat_interleave(2)[:, None].expand_as(mask), {}


def test_pairwise_loss_is_checked_in_pairs():
    check_policy_loss(pair_loss, reads_advantages=False, rows_per_unit=2)

    def neighbours(*args: Any):
        loss, metrics = pair_loss(*args)
        return loss + loss.roll(2, 0), metrics

    violated = violated_by(check_policy_loss, neighbours, reads_advantages=False, rows_per_unit=2)
    assert {"row_order", "micro_batches", "data_parallel"} <= violated


def check_selector(select: Callable[..., torch.Tensor]) -> None:
    """Check a loss without the tokens that `select(log_probs, mask, noise)` names."""

    def drops_selected(log_probs, old, advantages, config, mask, rollout, *, selected_tokens):
        given = SimpleNamespace(log_probs=log_probs, old=old, advantages=advantages)
        return torch.where(selected_tokens, 0.0, surrogate(given)), {}

    def selector(log_probs, old, advantages, mask, noise, config):
        return (mask != 0) & select(log_probs, mask, noise)

    check_policy_loss(drops_selected, selector=selector)


@pytest.mark.parametrize(
    "select",
    [
        lambda log_probs, mask, noise: log_probs >= torch.where(mask != 0, log_probs, -1e9).max(),
        lambda log_probs, mask, noise: noise > 0.8,
    ],
    ids=["likeliest", "luckiest"],
)
def test_correct_selector_passes(select):
    check_selector(select)


def group_means_of(rewards: torch.Tensor, mask: torch.Tensor, index: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.where(mask != 0, rewards, 0.0).sum(-1, dtype=torch.float64)
    same = torch.tensor([[one == other for other in index] for one in index]).double() * (mask.sum(-1) > 0)
    return scores, (same @ scores) / same.sum(-1).clamp(min=1)


def plain(*, token_level_rewards, response_mask, index, **_):
    scores, means = group_means_of(token_level_rewards, response_mask, index)
    advantages = torch.where(response_mask != 0, (scores - means).to(token_level_rewards.dtype)[:, None], 0.0)
    return advantages, advantages


def std_of_the_batch(*, response_mask, **given):
    advantages, _ = plain(response_mask=response_mask, **given)
    return (advantages / advantages[response_mask != 0].std(),) * 2


def unmasked(*, token_level_rewards, response_mask, index, **_):
    scores, means = group_means_of(token_level_rewards, response_mask, index)
    advantages = (scores - means).to(token_level_rewards.dtype)[:, None].expand_as(response_mask)
    return advantages, advantages


def masked_by_multiplication(*, token_level_rewards, response_mask, **given):
    scores = torch.zeros_like(token_level_rewards)
    scores[:, 0] = (token_level_rewards * response_mask).sum(-1)
    return plain(token_level_rewards=scores, response_mask=response_mask, **given)


def reward_of_the_last_column(*, token_level_rewards, **given):
    last = torch.zeros_like(token_level_rewards)
    last[:, 0] = token_level_rewards[:, -1]
    return plain(token_level_rewards=last, **given)


def groups_by_name(*, index, **given):
    advantages, returns = plain(index=index, **given)
    first = torch.tensor([name == min(map(str, index)) for name in map(str, index)])
    return torch.where(first[:, None], 2 * advantages, advantages), returns


def without_a_baseline(*, token_level_rewards, response_mask, **_):
    return token_reward(token_level_rewards.sum(-1, keepdim=True), response_mask)


def token_reward(rewards: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.where(mask != 0, rewards.nan_to_num(posinf=0, neginf=0), 0.0)
    return advantages, advantages


def counts_empty_rows(*, token_level_rewards, response_mask, index, **_):
    scores = torch.where(response_mask != 0, token_level_rewards, 0.0).sum(-1)
    same = torch.tensor([[one == other for other in index] for one in index]).to(scores.dtype)
    advantages = torch.where(response_mask != 0, (scores - same @ scores / same.sum(-1))[:, None], 0.0)
    return advantages, advantages


def clears_padding_in_place(*, token_level_rewards, response_mask, **given):
    token_level_rewards[response_mask == 0] = 0.0
    return plain(token_level_rewards=token_level_rewards, response_mask=response_mask, **given)


def variance_by_squares(*, token_level_rewards, response_mask, index, **_):
    scores, means = group_means_of(token_level_rewards, response_mask, index)
    _, squares = group_means_of((token_level_rewards.sum(-1, keepdim=True) + 100).square(), response_mask[:, :1], index)
    std = (squares.float() - (means.float() + 100).square()).clamp(min=0).sqrt()
    advantages = torch.where(response_mask != 0, ((scores - means).float() / (std + 1e-6))[:, None], 0.0)
    return advantages, advantages


# By what a function is caught, `...` where it sets off others, too. Most must not, or the list would say nothing.
WRONG_LOSSES: dict[str, tuple[Callable[[Any], Any], set[Any]]] = {
    "already reduced": (lambda b: (surrogate(b) * b.mask).sum() / b.mask.sum(), {"form"}),
    "mean over the padded width": (lambda b: in_mask(b, surrogate(b)) / b.mask.shape[1], {"padding"}),
    "mask by multiplication": (mask_by_multiplication, {"masked_garbage"}),
    "sequence ratio over all columns": (
        sequence_ratio_over_all_columns,
        {"padding", "masked_garbage", "masked_gradient", ...},
    ),
    "advantages scaled by the micro-batch": (
        advantages_scaled_by_the_micro_batch,
        {"micro_batches", "data_parallel"},
    ),
    "order of rows": (
        lambda b: surrogate(b) * (1 + torch.arange(len(b.mask)))[:, None],
        {"row_order", "micro_batches", "data_parallel"},
    ),
    "without a gradient": (lambda b: surrogate(b, log_probs=b.log_probs.detach()), {"gradient"}),
    "only rows that were good": (lambda b: surrogate(b, advantages=b.advantages.clamp(min=0)), {"gradient"}),
    "changes advantages": (lambda b: surrogate(b, advantages=b.advantages.mul_(b.mask)), {"inputs_unchanged"}),
    "changes the config": (changes_the_config, {"inputs_unchanged"}),
    "half precision": (
        lambda b: surrogate(b, log_probs=b.log_probs.bfloat16(), old=b.old.bfloat16()),
        {"float64"},
    ),
    "random dropping": (lambda b: surrogate(b) * (torch.rand_like(b.mask) < 0.9), {"deterministic", ...}),
    "metric of the micro-batch": (
        lambda b: (surrogate(b), {"mean": in_mask(b, b.log_probs.detach()).mean().expand_as(b.mask)}),
        {"micro_batches", "data_parallel", ...},
    ),
    "infinite where sure": (lambda b: surrogate(b) / (b.old - b.old), {"finite", ...}),
}
WRONG_SELECTORS: dict[str, tuple[Any, set[Any]]] = {
    "at random": (lambda log_probs, mask, noise: torch.rand_like(noise) > 0.8, {"deterministic", ...}),
    "likeliest of all columns": (
        lambda log_probs, mask, noise: log_probs >= log_probs.mean(),
        {"masked_garbage", ...},
    ),
    "first row": (lambda log_probs, mask, noise: (torch.arange(len(mask)) == 0)[:, None], {"row_order"}),
}
WRONG_ESTIMATORS: dict[str, tuple[Any, set[Any]]] = {
    "turned round": (lambda **given: tuple(-tensor for tensor in plain(**given)), {"reward_direction"}),
    "std of the batch": (std_of_the_batch, {"other_groups"}),
    "unmasked": (unmasked, {"masked_output"}),
    "masked by multiplication": (masked_by_multiplication, {"masked_garbage", ...}),
    "reward of the last column": (reward_of_the_last_column, {"padding", "masked_garbage"}),
    "rows in groups of three": (
        lambda index, **given: plain(index=[row // 3 for row in range(len(index))], **given),
        {"row_order", "other_groups", "group_constant"},
    ),
    "groups by name": (groups_by_name, {"group_names", ...}),
    "without a baseline": (without_a_baseline, {"group_constant", ...}),
    "counts empty rows": (counts_empty_rows, {"empty_rows"}),
    "clears padding in place": (clears_padding_in_place, {"inputs_unchanged"}),
    "variance by squares": (variance_by_squares, {"float64", ...}),
    "a number a row": (lambda token_level_rewards, **_: (token_level_rewards.sum(-1),) * 2, {"form"}),
}
WRONG_REDUCTIONS: dict[str, tuple[Any, set[Any]]] = {
    "mean of the width": (lambda mask, **_: mask / mask.numel(), {"padding", "sums_to_one", ...}),
    "mean of all rows": (
        lambda mask, **_: mask / (len(mask) * mask.sum(-1, keepdim=True).clamp(min=1)),
        {"empty_rows", "sums_to_one"},
    ),
    "all columns": (
        lambda mask, **_: torch.ones_like(mask) / mask.numel(),
        {"masked_output", "masked_garbage", ...},
    ),
    "divides by nothing": (lambda mask, **_: mask / mask.sum(), {"finite"}),
}
WRONG = {
    **{name: (check_policy_loss, policy_loss(loss), found) for name, (loss, found) in WRONG_LOSSES.items()},
    **{name: (check_selector, *rest) for name, rest in WRONG_SELECTORS.items()},
    **{name: (check_advantage_estimator, *rest) for name, rest in WRONG_ESTIMATORS.items()},
    **{name: (check_reduction, *rest) for name, rest in WRONG_REDUCTIONS.items()},
    "wrong sign": (check_policy_loss, wrong_sign, {"gradient_direction"}),
    "detached KL": (
        check_kl_estimator,
        lambda new, base, mask: compute_approx_kl(new, base, mask).detach(),
        {"gradient"},
    ),
    "unmasked KL": (check_kl_estimator, lambda new, base, mask: compute_approx_kl(new, base), {"masked_output"}),
    "critic that runs from the return": (
        check_critic_loss,
        lambda values, old, returns, config: (-(values - returns).square(), {}),
        {"gradient_direction"},
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("check, wrong, violated", WRONG.values(), ids=WRONG)
def test_wrong_function_is_caught_by_name(check: Callable[..., None], wrong: Any, violated: set[Any]):
    found = violated_by(check, wrong)
    assert found == violated or (... in violated and violated - {...} < found)


# ---- how it says so


def test_error_lists_all_violations_with_numbers():
    @policy_loss
    def two_faults(given):
        return in_mask(given, -surrogate(given)) / given.mask.shape[1]

    with pytest.raises(InvarianceError) as caught:
        check_policy_loss(two_faults)
    text = str(caught.value)
    assert text.startswith("the policy loss two_faults violates 2 invariances:")
    assert caught.value.names == ["gradient_direction", "padding"]
    for name in caught.value.names:
        assert INVARIANCES[name].rule in text
        assert INVARIANCES[name].usual_cause in text
    # 7 columns became 10, so the loss is 7/10 of what it was.
    place = "with 0 columns of padding on the left and 3 on the right: the loss of row 1, token 1: "
    assert f"{place}expected -0.5793143, got -0.40552 (43 of 43 differ)" in text


def test_function_exception_is_listed_as_violation():
    @policy_loss
    def picky(given):
        if len(given.mask) < 12:
            raise RuntimeError("I want all rows")
        return surrogate(given)

    words = "in micro-batches of 1: it raised RuntimeError: I want all rows"
    with pytest.raises(InvarianceError, match=words) as caught:
        check_policy_loss(picky)
    assert caught.value.names == ["micro_batches", "data_parallel"]


def test_invariance_can_be_exempted_with_reason():
    check_policy_loss(wrong_sign, exempt={"gradient_direction": "it is trained to fail"})
    with pytest.raises(ValueError, match="'padings'"):
        check_policy_loss(wrong_sign, exempt={"padings": "it is small"})
    with pytest.raises(ValueError, match="'padding': ''"):
        check_policy_loss(wrong_sign, exempt={"padding": ""})


def test_right_estimator_passes():
    check_advantage_estimator(plain)


def test_custom_registered_loss_is_checked():
    register_policy_loss("test_wrong_sign")(wrong_sign)
    try:
        with pytest.raises(InvarianceError, match="test_wrong_sign"):
            check_everything_registered()
        check_everything_registered(exempt={"test_wrong_sign": {"gradient_direction": "it is trained to fail"}})
    finally:
        PolicyLossRegistry.unregister("test_wrong_sign")


def test_settings_reach_function():
    @policy_loss
    def clips_at_zero(given):
        is_zero = given.config.eps_clip_low == 0.0
        return surrogate(given, log_probs=given.log_probs.detach() if is_zero else given.log_probs)

    check_policy_loss(clips_at_zero)
    with pytest.raises(InvarianceError):
        check_policy_loss(clips_at_zero, replace(AlgorithmConfig(), eps_clip_low=0.0))
