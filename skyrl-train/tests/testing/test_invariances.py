"""The kit passes everything registered, and catches, by name, every function that is wrong on purpose."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
def test_an_estimator_is_excused_only_from_what_it_really_breaks(name: str):
    assert violated_by(check_advantage_estimator, AdvantageEstimatorRegistry.get(name)) == set(NOT_MEANT_TO_HOLD[name])


def test_dr_grpo_is_excused_only_from_adding_up_to_one():
    dr_grpo = partial(token_weights, reduction="seq_mean_token_sum_norm")
    assert violated_by(check_reduction, dr_grpo) == {"sums_to_one"}


# ---- what is wrong is caught by name

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def surrogate(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -(log_probs - old).clamp(-20, 20).exp() * advantages


def already_reduced(log_probs, old, advantages, config, mask, rollout):
    return (surrogate(log_probs, old, advantages) * mask).sum() / mask.sum(), {}


def mean_over_the_padded_width(log_probs, old, advantages, config, mask, rollout):
    loss = torch.where(mask != 0, surrogate(log_probs, old, advantages), 0.0)
    return loss / loss.shape[1], {}


def mask_by_multiplication(log_probs, old, advantages, config, mask, rollout):
    mean_B1 = ((log_probs - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return -(mean_B1.detach() + log_probs - log_probs.detach()).exp() * advantages, {}


def sequence_ratio_over_all_columns(log_probs, old, advantages, config, mask, rollout):
    mean_B1 = (log_probs - old).nan_to_num(posinf=0, neginf=0).clamp(-20, 20).mean(-1, keepdim=True)
    return -mean_B1.exp() * advantages, {}


def advantages_scaled_by_the_micro_batch(log_probs, old, advantages, config, mask, rollout):
    kept = torch.where(mask != 0, advantages, 0.0)
    return surrogate(log_probs, old, kept / (kept.abs().max() + 1e-6)), {}


def order_of_rows(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs, old, advantages) * (1 + torch.arange(len(mask)))[:, None], {}


def wrong_sign(log_probs, old, advantages, config, mask, rollout):
    return -surrogate(log_probs, old, advantages), {}


def without_a_gradient(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs.detach(), old, advantages), {}


def only_rows_that_were_good(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs, old, advantages.clamp(min=0)), {}


def changes_advantages(log_probs, old, advantages, config, mask, rollout):
    advantages *= mask
    return surrogate(log_probs, old, advantages), {}


def changes_the_config(log_probs, old, advantages, config, mask, rollout):
    config.eps_clip_low = 0.3
    return surrogate(log_probs, old, advantages), {}


def half_precision(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs.bfloat16(), old.bfloat16(), advantages), {}


def random_dropping(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs, old, advantages) * (torch.rand_like(mask) < 0.9), {}


def metric_of_the_micro_batch(log_probs, old, advantages, config, mask, rollout):
    kept = torch.where(mask != 0, log_probs.detach(), 0.0)
    return surrogate(log_probs, old, advantages), {"mean": kept.mean().expand_as(mask)}


def infinite_where_sure(log_probs, old, advantages, config, mask, rollout):
    return surrogate(log_probs, old, advantages) / (old - old), {}


def pair_loss(log_probs, old, advantages, config, mask, rollout, *, turned=False):
    scores = torch.where(mask != 0, log_probs - old, 0.0).sum(-1)
    first, second = scores.unflatten(0, (-1, 2)).unbind(-1)
    loss = -torch.nn.functional.logsigmoid(first - second)
    return loss.repeat_interleave(2)[:, None].expand_as(mask), {}


def test_a_loss_of_pairs_is_checked_in_pairs():
    check_policy_loss(pair_loss, reads_advantages=False, rows_per_unit=2)

    def neighbours(*args: Any):
        loss, metrics = pair_loss(*args)
        return loss + loss.roll(2, 0), metrics

    violated = violated_by(check_policy_loss, neighbours, reads_advantages=False, rows_per_unit=2)
    assert {"row_order", "micro_batches", "data_parallel"} <= violated


def drops_selected(log_probs, old, advantages, config, mask, rollout, *, selected_tokens):
    return torch.where(selected_tokens, 0.0, surrogate(log_probs, old, advantages)), {}


def likeliest(log_probs, old, advantages, mask, noise, config):
    return (mask != 0) & (log_probs >= torch.where(mask != 0, log_probs, -1e9).max())


def luckiest(log_probs, old, advantages, mask, noise, config):
    return (mask != 0) & (noise > 0.8)


def at_random(log_probs, old, advantages, mask, noise, config):
    return (mask != 0) & (torch.rand_like(noise) > 0.8)


def likeliest_of_all_columns(log_probs, old, advantages, mask, noise, config):
    return (mask != 0) & (log_probs >= log_probs.mean())


def first_row(log_probs, old, advantages, mask, noise, config):
    return (mask != 0) & (torch.arange(len(mask)) == 0)[:, None]


def check_selector(selector: Any) -> None:
    check_policy_loss(drops_selected, selector=selector)


@pytest.mark.parametrize("selector", [likeliest, luckiest])
def test_a_right_selector_passes(selector):
    check_selector(selector)


def group_means_of(rewards: torch.Tensor, mask: torch.Tensor, index: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.where(mask != 0, rewards, 0.0).sum(-1, dtype=torch.float64)
    same = torch.tensor([[one == other for other in index] for one in index]).double() * (mask.sum(-1) > 0)
    return scores, (same @ scores) / same.sum(-1).clamp(min=1)


def plain(*, token_level_rewards, response_mask, index, **_):
    scores, means = group_means_of(token_level_rewards, response_mask, index)
    advantages = torch.where(response_mask != 0, (scores - means).to(token_level_rewards.dtype)[:, None], 0.0)
    return advantages, advantages


def turned_round(**given):
    advantages, _ = plain(**given)
    return -advantages, -advantages


def std_of_the_batch(*, response_mask, **given):
    advantages, _ = plain(response_mask=response_mask, **given)
    advantages = advantages / advantages[response_mask != 0].std()
    return advantages, advantages


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


def rows_in_groups_of_three(*, token_level_rewards, response_mask, index, **_):
    return plain(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=[row // 3 for row in range(len(index))],
    )


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


def a_number_a_row(*, token_level_rewards, **_):
    return token_level_rewards.sum(-1), token_level_rewards.sum(-1)


def mean_of_the_width(mask, **_):
    return mask / mask.numel()


def mean_of_all_rows(mask, **_):
    return mask / (len(mask) * mask.sum(-1, keepdim=True).clamp(min=1))


def all_columns(mask, **_):
    return torch.ones_like(mask) / mask.numel()


def divides_by_nothing(mask, **_):
    return mask / mask.sum()


def detached_kl(new, base, mask):
    return compute_approx_kl(new, base, mask).detach()


def unmasked_kl(new, base, mask):
    return compute_approx_kl(new, base)


def runs_from_the_return(values, old, returns, config):
    return -(values - returns).square(), {}


# By what a function is caught, `...` where it sets off others, too. Most must not, or the list would say nothing.
WRONG_LOSSES: dict[Loss, set[Any]] = {
    already_reduced: {"form"},
    mean_over_the_padded_width: {"padding"},
    mask_by_multiplication: {"masked_garbage"},
    sequence_ratio_over_all_columns: {"padding", "masked_garbage", "masked_gradient", ...},
    advantages_scaled_by_the_micro_batch: {"micro_batches", "data_parallel"},
    order_of_rows: {"row_order", "micro_batches", "data_parallel"},
    wrong_sign: {"gradient_direction"},
    without_a_gradient: {"gradient"},
    only_rows_that_were_good: {"gradient"},
    changes_advantages: {"inputs_unchanged"},
    changes_the_config: {"inputs_unchanged"},
    half_precision: {"float64"},
    random_dropping: {"deterministic", ...},
    metric_of_the_micro_batch: {"micro_batches", "data_parallel", ...},
    infinite_where_sure: {"finite", ...},
}
WRONG_SELECTORS: dict[Any, set[Any]] = {
    at_random: {"deterministic", ...},
    likeliest_of_all_columns: {"masked_garbage", ...},
    first_row: {"row_order"},
}
WRONG_ESTIMATORS: dict[Any, set[Any]] = {
    turned_round: {"reward_direction"},
    std_of_the_batch: {"other_groups"},
    unmasked: {"masked_output"},
    masked_by_multiplication: {"masked_garbage", ...},
    reward_of_the_last_column: {"padding", "masked_garbage"},
    rows_in_groups_of_three: {"row_order", "other_groups", "group_constant"},
    groups_by_name: {"group_names", ...},
    without_a_baseline: {"group_constant", ...},
    counts_empty_rows: {"empty_rows"},
    clears_padding_in_place: {"inputs_unchanged"},
    variance_by_squares: {"float64", ...},
    a_number_a_row: {"form"},
}
WRONG_REDUCTIONS: dict[Any, set[Any]] = {
    mean_of_the_width: {"padding", "sums_to_one", ...},
    mean_of_all_rows: {"empty_rows", "sums_to_one"},
    all_columns: {"masked_output", "masked_garbage", ...},
    divides_by_nothing: {"finite"},
}
WRONG = [
    *((check_policy_loss, loss, violated) for loss, violated in WRONG_LOSSES.items()),
    *((check_selector, selector, violated) for selector, violated in WRONG_SELECTORS.items()),
    *((check_advantage_estimator, estimator, violated) for estimator, violated in WRONG_ESTIMATORS.items()),
    *((check_reduction, reduction, violated) for reduction, violated in WRONG_REDUCTIONS.items()),
    (check_kl_estimator, detached_kl, {"gradient"}),
    (check_kl_estimator, unmasked_kl, {"masked_output"}),
    (check_critic_loss, runs_from_the_return, {"gradient_direction"}),
]


@pytest.mark.parametrize("check, wrong, violated", WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_function_is_caught_by_name(check: Callable[..., None], wrong: Any, violated: set[Any]):
    found = violated_by(check, wrong)
    assert found == violated or (... in violated and violated - {...} < found)


# ---- how it says so


def test_one_error_lists_every_violation_with_its_numbers():
    def two_faults(log_probs, old, advantages, config, mask, rollout):
        loss = torch.where(mask != 0, surrogate(log_probs, old, -advantages), 0.0)
        return loss / loss.shape[1], {}

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


def test_exception_of_a_function_is_listed_as_violation():
    def picky(log_probs, old, advantages, config, mask, rollout):
        if len(mask) < 12:
            raise RuntimeError("I want all rows")
        return surrogate(log_probs, old, advantages), {}

    with pytest.raises(
        InvarianceError, match="in micro-batches of 1: it raised RuntimeError: I want all rows"
    ) as caught:
        check_policy_loss(picky)
    assert caught.value.names == ["micro_batches", "data_parallel"]


def test_an_invariance_can_be_excused_by_name_and_with_a_reason():
    check_policy_loss(wrong_sign, exempt={"gradient_direction": "it is trained to fail"})
    with pytest.raises(ValueError, match=r"names out of form, .*; got 'padings'"):
        check_policy_loss(surrogate, exempt={"padings": "it is small"})
    with pytest.raises(ValueError, match="'padding': ''"):
        check_policy_loss(surrogate, exempt={"padding": ""})


def test_right_estimator_passes():
    check_advantage_estimator(plain)


def test_a_users_registered_loss_is_checked_with_all_others():
    register_policy_loss("test_wrong_sign")(wrong_sign)
    try:
        with pytest.raises(InvarianceError, match="the policy loss test_wrong_sign violates 1 invariance:"):
            check_everything_registered()
        check_everything_registered(exempt={"test_wrong_sign": {"gradient_direction": "it is trained to fail"}})
    finally:
        PolicyLossRegistry.unregister("test_wrong_sign")


def test_settings_reach_the_function():
    def clips_at_zero(log_probs, old, advantages, config, mask, rollout):
        if config.eps_clip_low == 0.0:
            return surrogate(log_probs.detach(), old, advantages), {}
        return surrogate(log_probs, old, advantages), {}

    check_policy_loss(clips_at_zero)
    with pytest.raises(InvarianceError):
        check_policy_loss(clips_at_zero, replace(AlgorithmConfig(), eps_clip_low=0.0))
