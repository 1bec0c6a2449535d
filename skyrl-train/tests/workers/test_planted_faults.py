"""Faults of the division of work, planted one at a time, and the invariance that each of them breaks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

MICRO_SIZE = 2


def assert_gradient_does_not_depend_on_division(learners: Any, config: Any, batch: Any, num_ranks: int) -> None:
    """The norm that a step reports, before clipping: of one rank with all rows at once and no clipping, and of
    `num_ranks` with micro-batches of two rows and a gradient that is clipped."""

    def norm(micro_size: int, ranks: int, max_grad_norm: float) -> float:
        optimizer = {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": max_grad_norm}
        cfg = config(micro_size, policy={"optimizer_config": optimizer})
        return learners.step("policy", cfg, batch, ranks).grad_norm

    whole = norm(len(batch), 1, 1e9)
    assert norm(MICRO_SIZE, num_ranks, whole / 100) == pytest.approx(whole, rel=1e-5)


def parameters_of(worker: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in worker.backend.model.parameters() if parameter.grad is not None]


# ---- faults: each takes the worker class that it changes


def token_mean_of_each_micro_batch(worker_class: Any) -> Any:
    """Every micro-batch is averaged over its own tokens, and these means over the micro-batches."""

    class Faulty(worker_class):
        def forward_backward(self, micro_batches: Any) -> Any:
            for micro_batch in micro_batches:
                rows = list(micro_batch.rows)
                mask = self.batch.tensor("loss_mask")[rows]
                self.batch.tensor("loss_weights")[rows] = mask / mask.sum() / len(micro_batches)
            return super().forward_backward(micro_batches)

    return Faulty


def gradients_not_rescaled_over_ranks(worker_class: Any) -> Any:
    """FSDP's mean over ranks is left as it is."""

    class Faulty(worker_class):
        def forward_backward(self, micro_batches: Any) -> Any:
            sums = super().forward_backward(micro_batches)
            for parameter in parameters_of(self):
                parameter.grad /= dist.get_world_size()
            return sums

    return Faulty


def clipping_at_each_micro_batch(worker_class: Any) -> Any:
    """The gradient is clipped whenever a micro-batch has been added to it."""

    class Faulty(worker_class):
        def forward_backward(self, micro_batches: Any) -> Any:
            for micro_batch in micro_batches:
                sums = super().forward_backward([micro_batch])
                torch.nn.utils.clip_grad_norm_(
                    parameters_of(self), self.cfg.trainer.policy.optimizer_config.max_grad_norm
                )
            return sums

    return Faulty


@pytest.mark.parametrize(
    "fault, num_ranks",
    [
        (token_mean_of_each_micro_batch, 1),
        (gradients_not_rescaled_over_ranks, 2),
        (clipping_at_each_micro_batch, 1),
    ],
)
def test_fault_in_the_division_of_work_is_caught(learners, learners_with, config, ragged_batch, fault, num_ranks):
    batch = ragged_batch()
    assert_gradient_does_not_depend_on_division(learners, config, batch, num_ranks)
    with pytest.raises(AssertionError, match=r"assert .* == .* ± "):
        assert_gradient_does_not_depend_on_division(learners_with(fault), config, batch, num_ranks)
