"""Optimizer steps skipped because of a non-finite gradient: counts, probable cause, and the limit of consecutive
skips."""

import math
from collections.abc import Iterable, Sequence

import torch
from loguru import logger

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import NonFiniteUpdateError
from skyrl_train.orchestration.batch_calls import UpdateResult
from skyrl_train.training_batch import TrainingInputBatch

_COLUMNS = {
    "rewards": "rewards (the environment, or the KL penalty)",
    "advantages": "advantages (trainer.algorithm.advantage_estimator={estimator})",
    "returns": "returns (trainer.algorithm.advantage_estimator={estimator})",
    "action_log_probs": "log-probs of the policy (its weights)",
    "base_action_log_probs": "log-probs of the reference model (its weights)",
    "rollout_logprobs": "log-probs of the rollout engine",
    "values": "values of the critic (its weights)",
}
"""Columns of a batch in the order in which each is computed from those before."""


class SkippedUpdates:
    """Counter of one model's skipped optimizer steps.

    Args:
        name: name of the model, for errors.
        section: metric section.
        limit: `trainer.max_consecutive_skipped_updates`; None for no limit.
        estimator, loss: values of these settings, for error messages.
    """

    def __init__(self, name: str, section: str, limit: int | None, *, estimator: str, loss: str):
        self._name = name
        self._section = section
        self._limit = limit
        self._estimator = estimator
        self._loss = loss
        self._num_in_a_row = 0
        self._num_applied = 0

    def state(self) -> dict[str, int]:
        """Return the counts, for a checkpoint."""
        return {"num_in_a_row": self._num_in_a_row, "num_applied": self._num_applied}

    def load_state(self, state: dict[str, int]) -> None:
        """Restore the counts returned by `state`."""
        self._num_in_a_row, self._num_applied = state["num_in_a_row"], state["num_applied"]

    def count(self, update: UpdateResult, batch: TrainingInputBatch, *, is_last_step: bool) -> dict[str, float]:
        """Count the optimizer steps of one training step. Returns metrics.

        Raises:
            NonFiniteUpdateError: the limit of consecutive skips was reached, or the run ends without an update.
        """
        num_skipped, longest = 0, self._num_in_a_row
        for step in update.steps:
            is_skipped = step["skipped_updates"] > 0
            num_skipped += is_skipped
            self._num_in_a_row = self._num_in_a_row + 1 if is_skipped else 0
            self._num_applied += not is_skipped
            longest = max(longest, self._num_in_a_row)
        if num_skipped:
            self._report(num_skipped, longest, self._find_non_finite(update, batch), is_last_step)
        return {f"{self._section}/consecutive_skipped_updates": float(self._num_in_a_row)}

    def _report(self, num_skipped: int, longest: int, not_finite: str, is_last_step: bool) -> None:
        why = f"because the gradient was not finite. Not finite in this step: {not_finite}"
        if self._limit is not None and longest >= self._limit:
            raise NonFiniteUpdateError(
                f"{longest} optimizer steps of the {self._name} in a row were skipped "
                f"(trainer.max_consecutive_skipped_updates={self._limit}) {why}"
            )
        if self._limit is not None and is_last_step and not self._num_applied:
            raise NonFiniteUpdateError(
                f"the run finished without an update: all optimizer steps of the {self._name} were skipped {why}"
            )
        logger.warning(f"{num_skipped} optimizer steps of the {self._name} were skipped {why}")

    def _find_non_finite(self, update: UpdateResult, batch: TrainingInputBatch) -> str:
        """Name the earliest non-finite columns or losses: later ones are consequences."""
        columns = [
            text.format(estimator=self._estimator)
            for name, text in _COLUMNS.items()
            if batch.get(name) is not None and not _is_finite(batch, name)
        ]
        if columns:
            return ", ".join(columns)
        losses = _find_non_finite_losses(sums for ranks in update.losses for sums in ranks)
        if not losses:
            return (
                "only the gradient, the loss is finite: weights or learning rate too large, or an operation without "
                "a finite derivative (0/0, sqrt of 0, log of 0)"
            )
        source = f" (trainer.algorithm.policy_loss_type={self._loss})" if "policy_loss" in losses else ""
        return f"{', '.join(losses)}{source}"


def skipped_updates(name: str, cfg: SkyRLConfig, *, section: str | None = None) -> SkippedUpdates:
    """Create a counter from the settings. Args: metric `section`, by default the model's name."""
    algorithm = cfg.trainer.algorithm
    return SkippedUpdates(
        name,
        section or name,
        cfg.trainer.max_consecutive_skipped_updates,
        estimator=algorithm.advantage_estimator,
        loss=algorithm.policy_loss_type,
    )


def _is_finite(batch: TrainingInputBatch, name: str) -> bool:
    counts = batch.tensor("loss_mask") != 0
    return bool(torch.isfinite(torch.where(counts, batch.tensor(name), 0.0)).all())


def _find_non_finite_losses(sums: Iterable[dict[str, float]]) -> Sequence[str]:
    """Return the names of non-finite loss components, without their sum."""
    names = {
        key.removeprefix("loss/")
        for of_rank in sums
        for key, value in of_rank.items()
        if key.startswith("loss/") and not math.isfinite(value)
    }
    return sorted(names - {"final_loss"}) or sorted(names)
