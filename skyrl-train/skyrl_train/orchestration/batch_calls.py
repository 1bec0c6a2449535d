"""A batch through a group of workers: every row once, in the micro-batches of a schedule, and back in its order."""

from dataclasses import dataclass

import torch

from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_backends.base import MetricSums
from skyrl_train.training_batch import TrainingInputBatch

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
    ),
    "critic": ("sequences", "attention_mask", "loss_mask", "critic_loss_weights", "values", "returns"),
}
"""The columns of a batch that learning reads."""


@dataclass(frozen=True)
class Learnt:
    """What came of the optimizer steps on one batch."""

    losses: list[list[MetricSums]]
    """Of each optimizer step, every shard's sums."""

    steps: list[dict[str, float]]
    """What each optimizer step returned."""

    old_log_probs: torch.Tensor | None
    """[B, R], where they came from the training forward itself."""


async def forward(group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch) -> torch.Tensor:
    """What the group's model says of every response token [B, R]: log-probs, or a critic's values."""
    inputs = batch.select(["sequences", "attention_mask"], ["response_length"])
    args = list(zip(schedule.shard(inputs), schedule.whole(), strict=True))
    return schedule.gather(await group.call_shards("forward", args), "output")


async def learn(group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch, epochs: int) -> Learnt:
    """One optimizer step for each mini-batch of the schedule, `epochs` times over. The ranks are given all of it at
    once and go through it without waiting for us. Policy workers that are given no `action_log_probs` use those of
    their own forward, which come back as `old_log_probs`."""
    own_log_probs = group.name == "policy" and batch.get("action_log_probs") is None
    inputs = batch.select([name for name in INPUTS[group.name] if batch.get(name) is not None], ["response_length"])
    await group.call_shards("load_batch", [(own,) for own in schedule.shard(inputs)])
    nothing: list[tuple[()]] = [()] * group.num_shards
    one_epoch = [
        call
        for of_shards in schedule.mini_batches
        for call in (("forward_backward", [(own,) for own in of_shards]), ("optim_step", nothing))
    ]
    calls = one_epoch * epochs
    if not own_log_probs:
        answers, old = await group.call_in_turn(calls), None
    else:
        *answers, outputs = await group.call_in_turn([*calls, ("old_log_probs", nothing)])
        old = schedule.gather(outputs, "output")
    return Learnt(answers[0::2], [of_shards[0] for of_shards in answers[1::2]], old)
