"""Calls of a worker group on a whole batch: each row once, in the micro-batches of a schedule, outputs in row order."""

from dataclasses import dataclass

import torch

from skyrl_train.orchestration.actor_group import ActorGroup, DataParallelArgs
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_backends.base import MetricSums
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import RefWorker, Worker

INPUTS = {
    "policy": (
        "sequences",
        "attention_mask",
        "loss_mask",
        "loss_weights",
        "advantages",
        "action_log_probs",
        "base_action_log_probs",
        "rollout_logprobs",
        "off_policy_weights",
        "token_noise",
        "expert_routes",
        "kept_counts",
        "kept_ids",
        "teacher_ids",
        "teacher_log_probs",
    ),
    "critic": ("sequences", "attention_mask", "loss_mask", "critic_loss_weights", "values", "returns"),
}
"""Columns of a batch that training reads."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of the optimizer steps on one batch."""

    losses: list[list[MetricSums]]
    """[optimizer step][data-parallel rank] metric sums."""

    steps: list[dict[str, float]]
    """Return value of `optim_step` for each optimizer step."""

    old_log_probs: torch.Tensor | None
    """[B, R] log-probs of the training forward, where the batch came without `action_log_probs`."""

    entropies: torch.Tensor | None = None
    """[B, R] entropies of each row's first forward in training, where they were asked for."""


async def forward(group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch) -> torch.Tensor:
    """Compute log-probs (or a critic's values) [B, R] of the response tokens without gradients. If the batch has them,
    the policy replays `expert_routes`, and policy and reference renormalize over `kept_ids`."""
    args = _forward_args(group, schedule, batch)
    return schedule.gather(await group.call_data_parallel(Worker.forward, args), "output")


async def forward_recording_routes(
    group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the policy's log-probs [B, R] and the selected experts [B, T, L, k]."""
    outputs = await group.call_data_parallel(
        PolicyWorker.forward_recording_routes, _forward_args(group, schedule, batch)
    )
    return schedule.gather(outputs, "output"), schedule.gather(outputs, "expert_routes")


async def forward_top(
    group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ids and log-probs [B, R, K] of a reference model's most likely tokens at each response position."""
    args = [(*own, num_top) for own in _forward_args(group, schedule, batch)]
    outputs = await group.call_data_parallel(RefWorker.forward_top, args)
    return schedule.gather(outputs, "teacher_ids"), schedule.gather(outputs, "teacher_log_probs")


def forward_inputs(group: ActorGroup, batch: TrainingInputBatch) -> TrainingInputBatch:
    """Return the columns of a batch that a forward-only pass of this model reads."""
    names = ["sequences", "attention_mask"]
    if group.name == "policy" and batch.get("expert_routes") is not None:
        names.append("expert_routes")
    if group.name in ("policy", "ref") and batch.get("kept_ids") is not None:
        names += ["kept_counts", "kept_ids"]
    return batch.select(names, ["response_length"])


def _forward_args(group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch) -> DataParallelArgs:
    return list(zip(schedule.split(forward_inputs(group, batch)), schedule.merge_mini_batches(), strict=True))


async def train_on_batch(
    group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch, epochs: int, *, with_entropies: bool = False
) -> UpdateResult:
    """Take one optimizer step per mini-batch of the schedule, repeated for `epochs` epochs.

    The ranks receive all steps at once and do not wait for the driver. Without `action_log_probs` in the batch, policy
    workers use the log-probs of their training forward, returned as `old_log_probs`.

    Args:
        with_entropies: also return the policy's entropies.
    """
    own_log_probs = group.name == "policy" and batch.get("action_log_probs") is None
    inputs = batch.select([name for name in INPUTS[group.name] if batch.get(name) is not None], ["response_length"])
    await group.call_data_parallel(Worker.load_batch, [(own,) for own in schedule.split(inputs)])
    no_args: list[tuple[()]] = [()] * group.data_parallel_size
    one_epoch = [
        call
        for micro_batches in schedule.mini_batches
        for call in ((Worker.forward_backward, [(own,) for own in micro_batches]), (Worker.optim_step, no_args))
    ]
    calls = one_epoch * epochs
    if not (own_log_probs or with_entropies):
        answers, old, entropies = await group.call_sequence(calls), None, None
    else:
        *answers, outputs = await group.call_sequence([*calls, (PolicyWorker.first_scores, no_args)])
        old = schedule.gather(outputs, "output") if own_log_probs else None
        entropies = schedule.gather(outputs, "entropies") if with_entropies else None
    return UpdateResult(answers[0::2], [steps[0] for steps in answers[1::2]], old, entropies)
