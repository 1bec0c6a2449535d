"""A fault of the division of work over ranks, and the invariance that it breaks."""

from typing import Any

import pytest
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


def gradients_not_rescaled_over_ranks(worker_class: Any) -> Any:
    """FSDP's mean over ranks is left as it is."""

    class Faulty(worker_class):
        def forward_backward(self, micro_batches: Any) -> Any:
            sums = super().forward_backward(micro_batches)
            for parameter in self.backend.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()
            return sums

    return Faulty


def test_missing_gradient_rescaling_is_detected(learners, learners_with, config, ragged_batch):
    """Faults of one rank: `training_backends/test_backends.py`."""
    batch = ragged_batch()
    assert_gradient_does_not_depend_on_division(learners, config, batch, 2)
    with pytest.raises(AssertionError, match=r"assert .* == .* ± "):
        assert_gradient_does_not_depend_on_division(learners_with(gradients_not_rescaled_over_ranks), config, batch, 2)
