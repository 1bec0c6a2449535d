"""The loss and the gradient of a mini-batch are its own: no split over ranks or micro-batches changes them."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from ray import cloudpickle

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.config import SkyRLConfig
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.actor_group import ActorGroup, gather_rows, rows_of_ranks
from skyrl_train.workers.policy_worker import PolicyWorker

pytestmark = pytest.mark.slow
NUM_ROWS, NUM_PROMPT, NUM_RESPONSE = 16, 6, 7


def config(tiny_model: str, micro_size: int, **algorithm) -> SkyRLConfig:
    return SkyRLConfig.from_dict(
        {
            "trainer": {
                "policy": {"model": {"path": tiny_model}, "optimizer_config": {"lr": 1e-2, "weight_decay": 0.0}},
                "bf16": False,
                "micro_forward_batch_size_per_gpu": micro_size,
                "micro_train_batch_size_per_gpu": micro_size,
                "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_entropy_loss": True, **algorithm},
            }
        }
    )


def ragged_batch() -> TrainingInputBatch:
    """Rows of different lengths; an environment's words inside some responses; one failed rollout."""
    generator = torch.Generator().manual_seed(3)
    sequences = torch.randint(2, 64, (NUM_ROWS, NUM_PROMPT + NUM_RESPONSE), generator=generator)
    attention_mask = torch.ones_like(sequences)
    loss_mask = torch.ones(NUM_ROWS, NUM_RESPONSE)
    for row in range(NUM_ROWS):
        attention_mask[row, : row % 4] = 0
        used = 2 + row % (NUM_RESPONSE - 1)
        attention_mask[row, NUM_PROMPT + used :] = 0
        loss_mask[row, used:] = 0
        if row % 3 == 0:
            loss_mask[row, 1] = 0
    loss_mask[5] = 0
    noise = torch.randn(NUM_ROWS, NUM_RESPONSE, generator=generator)
    return TrainingInputBatch(
        sequences=sequences * attention_mask,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        advantages=noise,
        metadata={"response_length": NUM_RESPONSE},
    )


class Step(NamedTuple):
    """One optimizer step: the mini-batch's metric sums, the gradient's norm, old log-probs, the weights after it."""

    sums: dict[str, float]
    grad_norm: float
    old_log_probs: torch.Tensor
    weights: dict[str, torch.Tensor]


class FreshEachTime(PolicyWorker):
    """The policy, with a way back to where it began."""

    def begin_again(self, cfg: SkyRLConfig, checkpoint: str) -> None:
        self.cfg = cfg
        self.load_checkpoint(checkpoint)


OneStep = Callable[..., Step]


@pytest.fixture(scope="module")
def one_step(tiny_model: str, ray_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneStep]:
    """Takes one optimizer step from the same weights, on one or two ranks."""
    folder = tmp_path_factory.mktemp("policy")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
    groups: dict[int, ActorGroup] = {}

    async def group_of(num_ranks: int) -> ActorGroup:
        if num_ranks not in groups:
            groups[num_ranks] = ActorGroup(
                f"policy_of_{num_ranks}",
                FreshEachTime,
                (config(tiny_model, 4), PolicyLossRegistry.get("regular"), 10),
                num_ranks=num_ranks,
                device="cpu",
                log_folder=folder,
                timeout_seconds=120,
            )
            await groups[num_ranks].init_model()
            await groups[num_ranks].call_all("save_checkpoint", str(folder / str(num_ranks)))
        return groups[num_ranks]

    async def step(cfg: SkyRLConfig, num_ranks: int, batch: TrainingInputBatch, stage_old: bool = True) -> Step:
        group = await group_of(num_ranks)
        await group.call_all("begin_again", cfg, str(folder / str(num_ranks)))
        rows = rows_of_ranks(NUM_ROWS, NUM_ROWS, num_ranks)
        inputs = batch.select(["sequences", "attention_mask"])
        shards = await group.call_each("forward", [(inputs.rows(own),) for own in rows])
        old = gather_rows(shards, "output", rows)
        full = TrainingInputBatch(dict(batch), metadata=batch.metadata)
        if stage_old:
            full["action_log_probs"] = old
        full["base_action_log_probs"] = old - 0.3 * torch.nan_to_num(batch.tensor("advantages")).sign()
        reduction = cfg.trainer.algorithm.loss_reduction
        full["loss_weights"] = token_weights(batch.tensor("loss_mask"), reduction, max_seq_len=20)
        await group.call_each("stage", [(full.rows(own),) for own in rows])
        sums = await group.call_all("forward_backward", 0, NUM_ROWS // num_ranks)
        if not stage_old:
            old = gather_rows(await group.call_all("old_log_probs"), "output", rows)
        totals = {name: sum(rank[name] for rank in sums) for name in sums[0]}
        stepped, *_ = await group.call_all("optim_step")
        weights, *_ = await group.call_all("full_state")
        return Step(totals, stepped["grad_norm"], old, weights)

    yield lambda *args, **kwargs: asyncio.run(step(*args, **kwargs))
    for group in groups.values():
        group.kill()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_no_split_changes_loss_or_gradient(tiny_model, one_step, reduction):
    batch = ragged_batch()
    splits = list(itertools.product((1, 2), (1, 2, 8))) if reduction == "token_mean" else [(1, 8), (2, 2)]
    results = {
        split: one_step(config(tiny_model, split[1], loss_reduction=reduction), split[0], batch) for split in splits
    }
    expected_sums, expected_norm, expected_old, expected_weights = results[splits[0]]
    assert expected_norm > 0.01
    assert expected_sums["token/policy_kl"] > 0
    kept = batch.tensor("loss_mask") > 0
    for split, (sums, grad_norm, old, weights) in results.items():
        assert grad_norm == pytest.approx(expected_norm, rel=1e-5), split
        torch.testing.assert_close(old[kept], expected_old[kept], atol=1e-5, rtol=0)
        for name, value in expected_sums.items():
            assert sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (split, name)
        for name, weight in expected_weights.items():
            # The first Adam step is lr * sign(g) where g is not tiny: compare what is not at that edge.
            assert (weights[name] - weight).abs().median() < 1e-5, (split, name)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_ratio_is_exactly_one(tiny_model, one_step, num_ranks):
    sums, *_ = one_step(config(tiny_model, 4), num_ranks, ragged_batch())
    assert sums["token/ratio"] == sums["num_tokens"]
    assert sums["token/clip_ratio"] == 0.0


def test_one_update_needs_no_forward_of_its_own_for_the_old_log_probs(tiny_model, one_step):
    batch = ragged_batch()
    sums, norm, old, weights = one_step(config(tiny_model, 4), 2, batch)
    own_sums, own_norm, own_old, own_weights = one_step(config(tiny_model, 4), 2, batch, stage_old=False)
    kept = batch.tensor("loss_mask") > 0
    assert torch.equal(own_old[kept], old[kept])
    assert own_sums == sums
    assert own_norm == norm
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())


def test_what_stands_at_padding_changes_nothing(tiny_model, one_step):
    batch, polluted = ragged_batch(), ragged_batch()
    padding = polluted.tensor("attention_mask") == 0
    polluted["sequences"] = torch.where(padding, 63, polluted.tensor("sequences"))
    polluted["advantages"] = torch.where(polluted.tensor("loss_mask") == 0, float("nan"), polluted.tensor("advantages"))
    expected = one_step(config(tiny_model, 4), 1, batch)
    actual = one_step(config(tiny_model, 4), 1, polluted)
    assert actual[1] == pytest.approx(expected[1], rel=1e-5)
    assert actual[0]["loss/final_loss"] == pytest.approx(expected[0]["loss/final_loss"], rel=1e-5, abs=1e-6)
