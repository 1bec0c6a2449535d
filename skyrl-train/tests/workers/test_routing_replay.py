"""Routes are recorded and replayed alike however the rows are divided over ranks and micro-batches."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from skyrl_train.expert_routes import no_route
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import Worker


@pytest.fixture(scope="module")
def mixture(save_mixture: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "mixture"
    return save_mixture(folder, scale=3.0, num_experts=8, num_attention_heads=4, num_key_value_heads=2)


class Step(NamedTuple):
    """One optimizer step on recorded or given routes."""

    log_probs: torch.Tensor
    routes: torch.Tensor
    replayed_log_probs: torch.Tensor
    sums: dict[str, float]
    grad_norm: float


async def take_step(
    learners: Any, cfg: Any, batch: TrainingInputBatch, num_ranks: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> Step:
    group = await learners.group("policy", cfg, num_ranks)
    micro_size = cfg.trainer.micro_train_batch_size_per_gpu
    lengths = batch.tensor("attention_mask").sum(dim=1).tolist()
    schedule = Schedule.of(lengths, [range(len(batch))], group.data_parallel_size, micro_batch_size=micro_size)

    def args(rows: TrainingInputBatch) -> Any:
        return list(zip(schedule.split(rows), schedule.merge_mini_batches(), strict=True))

    inputs = batch.select(["sequences", "attention_mask"])
    recorded = await group.call_data_parallel(PolicyWorker.forward_recording_routes, args(inputs))
    log_probs, routes = schedule.gather(recorded, "output"), schedule.gather(recorded, "expert_routes")
    full = TrainingInputBatch(dict(batch), metadata=batch.metadata)
    full["expert_routes"] = change(routes)
    inputs = full.select(["sequences", "attention_mask", "expert_routes"])
    replayed = schedule.gather(await group.call_data_parallel(Worker.forward, args(inputs)), "output")
    full["action_log_probs"] = replayed
    full["loss_weights"] = batch.tensor("loss_mask") / batch.tensor("loss_mask").sum()
    await group.call_data_parallel(Worker.load_batch, [(own,) for own in schedule.split(full)])
    [micro_batches] = schedule.mini_batches
    sums = await group.call_data_parallel(Worker.forward_backward, [(own,) for own in micro_batches])
    stepped, *_ = await group.call_all(Worker.optim_step)
    total = {name: float(sum(each[name] for each in sums)) for name in sums[0] if not name.startswith("max/")}
    return Step(log_probs, routes, replayed, total, stepped["grad_norm"])


def other_routes(routes: torch.Tensor) -> torch.Tensor:
    """Every token goes to other experts, padding to none."""
    none = no_route(routes.dtype)
    return torch.where(routes == none, none, (routes + 3) % 8)


LAYOUTS = [(1, 1, 4, True), (1, 1, 3, False), (2, 1, 2, True), (2, 2, 4, True)]
"""Ranks, ranks that share a sequence, rows of a micro-batch, packing."""


def steps_of(learners: Any, config: Any, batch: TrainingInputBatch, mixture: str, change: Any) -> list[Step]:
    model = {"model": {"path": mixture}, "routing_replay": "R2"}
    steps = []
    for num_ranks, shared, micro_size, packing in LAYOUTS:
        policy = model | {"sequence_parallel_size": shared}
        cfg = config(micro_size, policy, use_sample_packing=packing)
        steps.append(asyncio.run(take_step(learners, cfg, batch, num_ranks, change)))
    return steps


@pytest.mark.first_case
@pytest.mark.parametrize("change", [lambda routes: routes, other_routes], ids=["own", "other"])
def test_routes_and_step_are_independent_of_ranks_and_packing(
    learners: Any, config: Any, ragged_batch: Any, mixture: str, change: Any, tmp_path: Path
):
    batch = ragged_batch(13)  # no whole number of rows or tokens a rank
    is_token = batch.tensor("attention_mask") == 1
    expected, *others = steps_of(learners, config, batch, mixture, change)
    none = no_route(torch.uint8)
    assert ((expected.routes == none) == ~is_token[..., None, None]).all()
    kept = batch.tensor("loss_mask") > 0
    distance = (expected.replayed_log_probs - expected.log_probs)[kept].abs().mean()
    if change is other_routes:
        assert distance > 0.05
        assert expected.sums["loss/replayed_routes_differing"] > 0.3
    else:
        assert distance == 0
        assert expected.sums["loss/replayed_routes_differing"] == 0
    for step in others:
        same = (step.routes.sort(-1).values == expected.routes.sort(-1).values).all(dim=(-1, -2))
        assert same.all()
        torch.testing.assert_close(step.replayed_log_probs[kept], expected.replayed_log_probs[kept], atol=1e-5, rtol=0)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert step.sums == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in expected.sums.items()}
