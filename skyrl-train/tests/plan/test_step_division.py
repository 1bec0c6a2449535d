"""Division of a training step: arithmetic one can check by hand."""

import pytest
from settings_of_plans import settings

from skyrl_train.step_plan import ModelPlan, StepPlan, step_plan


def model_plan(plan: StepPlan, name: str) -> ModelPlan:
    return next(model for model in plan.models if model.name == name)


def test_step_is_divided_into_mini_batches_and_micro_batches():
    cfg = settings(**{
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.policy.sequence_parallel_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        "trainer.update_epochs_per_batch": 2,
    })  # fmt: skip
    policy = model_plan(step_plan(cfg), "policy")
    # 12 samples a mini-batch over 4 workers / 2 = 2 ranks: 6 each, in micro-batches of 2. (Those of 3 are for others.)
    assert policy == ModelPlan(
        "policy", 2, 2, 4, 12, 6, micro_batches=3, dummy_micro_batches=0, forward_micro_batches=2 * 3
    )


def test_uneven_shares_are_filled_up():
    cfg = settings(**{"trainer.placement.policy_num_gpus_per_node": 5, "trainer.micro_train_batch_size_per_gpu": 2})
    policy = model_plan(step_plan(cfg), "policy")
    # 12 samples over 5 ranks: 3, 3, 2, 2, 2; in micro-batches of 2: 2, 2, 1, 1, 1. Three ranks compute a dummy.
    assert (policy.samples_a_rank, policy.micro_batches, policy.dummy_micro_batches) == (3, 2, 3)
    assert "3 dummy micro-batches" in str(step_plan(cfg))


def test_prompts_left_out_are_counted():
    plan = step_plan(settings(**{"trainer.epochs": 3}), num_prompts=30)
    assert (plan.num_steps, plan.prompts_left_out) == (9, 6)  # 3 batches of 8 an epoch
    assert "dropped: 6 prompts per epoch" in str(plan)
    assert "9 training steps; optimizer steps: 18 of the policy" in str(plan)
    assert step_plan(settings(**{"trainer.epochs": 3, "trainer.max_training_steps": 4}), num_prompts=30).num_steps == 4


def test_nothing_is_said_to_be_left_out_where_nothing_is():
    assert "dropped" not in str(step_plan(settings(), num_prompts=32))


def test_token_budget_sets_micro_batch_size():
    cfg = settings(**{"trainer.max_tokens_per_microbatch": 450})
    # Samples have up to 60 + 40 tokens: at least 4 fit. 12 / 4 = 3.
    assert model_plan(step_plan(cfg), "policy").micro_batches == 3
    assert "at most 450 tokens" in str(step_plan(cfg))
    # One longer than the budget has a micro-batch of its own.
    cfg = settings(**{"trainer.max_tokens_per_microbatch": 50})
    assert model_plan(step_plan(cfg), "policy").micro_batches == 12


def test_single_update_needs_no_forward_pass():
    cfg = settings(**{"trainer.policy_mini_batch_size": 8})
    assert model_plan(step_plan(cfg), "policy").forward_micro_batches == 0
    cfg.trainer.update_epochs_per_batch = 2
    assert model_plan(step_plan(cfg), "policy").forward_micro_batches == 24


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ("response", "from 0 to 1 between response tokens 20 and 40"),
        ("context", "from 0 to 1 between tokens 80 and 100 of prompt and response; after a prompt of 60 tokens it"),
    ],
)
def test_plan_reports_overlong_penalty_range(counts: str, said: str):
    buffer = {"trainer.algorithm.overlong_buffer.len": 20, "trainer.algorithm.overlong_buffer.counts": counts}
    assert said in str(step_plan(settings(**buffer)))
    assert "overlong" not in str(step_plan(settings()))


def test_critic_and_reference_are_planned_if_there_are_any():
    assert [model.name for model in step_plan(settings()).models] == ["policy"]
    cfg = settings(**{"trainer.critic.model.path": "somewhere", "trainer.algorithm.use_kl_loss": True})
    critic, reference = model_plan(step_plan(cfg), "critic"), model_plan(step_plan(cfg), "reference")
    assert (critic.optimizer_steps, critic.samples_a_mini_batch, critic.forward_micro_batches) == (1, 24, 24)
    assert (reference.optimizer_steps, reference.micro_batches, reference.forward_micro_batches) == (0, 0, 24)
