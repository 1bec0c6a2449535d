"""Updates that are skipped one after the other end the run, with what was not finite."""

import math
from typing import Any

import pytest
import torch

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import NonFiniteUpdateError
from skyrl_train.orchestration.batch_calls import UpdateResult
from skyrl_train.orchestration.skipped_updates import SkippedUpdates, skipped_updates
from skyrl_train.training_batch import TrainingInputBatch

MASK = torch.tensor([[1.0, 1.0, 0.0]])


def batch(**columns: torch.Tensor) -> TrainingInputBatch:
    return TrainingInputBatch(loss_mask=MASK, **columns)


def learnt(*skipped: bool, policy_loss: float = 0.5, kl_loss: float = 0.0) -> UpdateResult:
    losses = {"loss/policy_loss": policy_loss, "loss/kl_loss": kl_loss, "loss/final_loss": policy_loss + kl_loss}
    return UpdateResult([[losses]] * len(skipped), [{"skipped_updates": float(step)} for step in skipped], None)


def counter(limit: int | None = 3) -> SkippedUpdates:
    algorithm = {"advantage_estimator": "rloo", "policy_loss_type": "gspo"}
    cfg = SkyRLConfig.from_dict({"trainer": {"max_consecutive_skipped_updates": limit, "algorithm": algorithm}})
    return skipped_updates("policy", cfg)


def test_successful_update_resets_skip_count():
    updates = counter(limit=3)
    name = "policy/consecutive_skipped_updates"
    assert updates.count(learnt(True, True), batch(), is_last_step=False) == {name: 2.0}
    assert updates.count(learnt(False, True, True), batch(), is_last_step=False) == {name: 2.0}
    with pytest.raises(NonFiniteUpdateError, match=r"^3 optimizer steps of the policy .*trainer\.max"):
        updates.count(learnt(True, False), batch(), is_last_step=False)


@pytest.mark.parametrize(
    "columns, losses, cause",
    [
        (
            {"advantages": [math.nan, 1.0, 0.0]},
            {"policy_loss": math.nan},
            "advantages (trainer.algorithm.advantage_est",
        ),
        (
            {"advantages": [1.0, 1.0, math.nan]},
            {"policy_loss": math.inf},
            "policy_loss (trainer.algorithm.policy_loss_t",
        ),
        ({"base_action_log_probs": [math.inf, 0.0, 0.0]}, {}, "log-probs of the reference model"),
        ({"advantages": [1.0, 1.0, 1.0]}, {"kl_loss": math.nan}, "kl_loss"),
        ({"advantages": [1.0, 1.0, 1.0]}, {}, "only the gradient"),
    ],
)
def test_error_names_first_non_finite_quantity(columns: dict[str, list[float]], losses: dict[str, Any], cause: str):
    found = batch(**{name: torch.tensor([values]) for name, values in columns.items()})
    with pytest.raises(NonFiniteUpdateError) as error:
        counter(limit=1).count(learnt(True, **losses), found, is_last_step=False)
    assert f"Not finite in this step: {cause}" in str(error.value)


def test_run_without_any_update_raises():
    with pytest.raises(NonFiniteUpdateError, match="without an update"):
        counter(limit=10).count(learnt(True), batch(), is_last_step=True)
    updates = counter(limit=10)
    updates.count(learnt(False), batch(), is_last_step=False)
    updates.count(learnt(True), batch(), is_last_step=True)
    counter(limit=None).count(learnt(*[True] * 50), batch(), is_last_step=True)


def test_resumed_run_continues_skip_count():
    before, resumed = counter(limit=3), counter(limit=3)
    before.count(learnt(False, True, True), batch(), is_last_step=False)
    resumed.load_state(before.state())
    with pytest.raises(NonFiniteUpdateError, match=r"^3 optimizer steps of the policy"):
        resumed.count(learnt(True), batch(), is_last_step=False)
    resumed = counter(limit=10)
    resumed.load_state(before.state())
    resumed.count(learnt(True), batch(), is_last_step=True)  # an earlier process made an update
