"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476, section 3.2): sample prompts until a batch is full of
prompts whose responses differ in reward.

`filters` decides which groups are informative. No state is kept between steps: groups that are sampled but not used are
counted and dropped.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch
from loguru import logger

from skyrl_train.algorithms.sampling import draw_replacements
from skyrl_train.config import DynamicSamplingConfig
from skyrl_train.errors import SkyRLError
from skyrl_train.rollouts.filters import is_informative, set_uid
from skyrl_train.rollouts.metrics import check_not_all_failed, compute_scores, concatenate
from skyrl_train.rollouts.types import RolloutBatch, TrajectoryGroup
from skyrl_train.types import PromptRow

_SETTING = "trainer.algorithm.dynamic_sampling"
_COUNTED = ("generate/num_failed/", "generate/num_retries")


async def sample_batch(
    request: Callable[[int], Awaitable[RolloutBatch]],
    settings: DynamicSamplingConfig,
    num_prompts: int,
    generator: torch.Generator,
) -> RolloutBatch:
    """Sample until a batch is full.

    Args:
        settings: `trainer.algorithm.dynamic_sampling`, with a type.
        request: samples one more batch of prompts; receives the number of batches sampled so far.
        num_prompts: number of prompts of a full batch.
        generator: random generator for type `replace`.

    Returns:
        The groups to train on. `generate/` metrics cover these groups, except failures and retries, which are counted
        over all sampled groups; metrics of dynamic sampling are added.

    Raises:
        SkyRLError: `max_sample_batches` batches did not fill one.
    """
    kept: list[RolloutBatch] = []
    tally = _Tally()
    while settings.max_sample_batches <= 0 or tally.num_batches < settings.max_sample_batches:
        sampled = await request(tally.num_batches)
        informative = [is_informative(group) for group in sampled.groups]
        tally.add(sampled, sum(informative))
        if settings.type == "filter":
            groups = [group for group, keep in zip(sampled.groups, informative, strict=True) if keep]
            kept += [replace(sampled, groups=groups)] if groups else []
            if tally.num_informative >= num_prompts:
                full = concatenate(kept)
                return RolloutBatch(full.groups[:num_prompts], full.metrics | tally.metrics(num_prompts))
        else:
            sources = draw_replacements(informative, settings.min_replace_ratio, generator)
            if sources is not None:
                return RolloutBatch(
                    _copy_groups(sampled.groups, sources), sampled.metrics | tally.metrics(tally.last_informative)
                )
        logger.info(
            f"dynamic sampling: {tally.num_informative} of {tally.num_prompts} prompts sampled for this step have "
            "responses that differ in reward; sampling another batch"
        )
    raise SkyRLError(
        f"{_SETTING}.type={settings.type} did not fill a batch of {num_prompts} prompts: {tally.num_batches} batches "
        f"({_SETTING}.max_sample_batches={settings.max_sample_batches}) of {tally.num_prompts} prompts in total gave "
        f"{tally.num_informative} whose responses differ in reward. The problems are too easy or too hard for this "
        "policy: change the data, raise generator.n_samples_per_prompt or max_sample_batches, or lower "
        "trainer.train_batch_size"
        + ("" if settings.type == "filter" else f" or min_replace_ratio (now {settings.min_replace_ratio})")
    )


def make_uids_unique(prompts: Sequence[PromptRow], seen: set[str]) -> list[PromptRow]:
    """Return the prompts with unique uids, and add these to `seen`. A prompt that occurs again in a step (when an epoch
    ends within it) is a separate group with separate samples."""
    rows = []
    for row in prompts:
        uid, number = row["uid"], 1
        while uid in seen:
            number += 1
            uid = f"{row['uid']}#{number}"
        seen.add(uid)
        rows.append(row | {"uid": uid})
    return rows


def _copy_groups(groups: Sequence[TrajectoryGroup], sources: Sequence[int]) -> list[TrajectoryGroup]:
    """Return the groups with `sources[place]` at each position, under the uid of the position: a copy counts as a
    separate group, so its advantages equal the original's and the number of prompts is unchanged."""
    return [set_uid(groups[source], group.uid) for group, source in zip(groups, sources, strict=True)]


class _Tally:
    """Counts of the groups sampled for one step."""

    def __init__(self) -> None:
        self.num_batches = self.num_prompts = self.num_informative = self.last_informative = 0
        self._num_scored = 0
        self._counts: dict[str, float] = {}
        self._reward = 0.0

    def add(self, sampled: RolloutBatch, num_informative: int) -> None:
        check_not_all_failed(
            sampled.trajectories, "a sampled batch failed completely, so there are no groups to select from"
        )
        num_prompts = len(sampled.groups)
        self.num_batches += 1
        self.num_prompts += num_prompts
        self.last_informative = num_informative
        self.num_informative += num_informative
        score = compute_scores(sampled.groups)["avg_score"]
        if score is not None:
            self._num_scored += num_prompts
            self._reward += num_prompts * score
        for name, value in sampled.metrics.items():
            if name.startswith(_COUNTED):
                self._counts[name] = self._counts.get(name, 0.0) + value

    def metrics(self, num_used: int) -> dict[str, float]:
        """Return the metrics of the sampling; `num_used` is the number of informative prompts that are trained on."""
        scores = {"reward/avg_raw_reward_of_all_sampled": self._reward / self._num_scored} if self._num_scored else {}
        return (
            self._counts
            | scores
            | {
                "generate/num_sampled_batches": float(self.num_batches),
                "generate/num_sampled_prompts": float(self.num_prompts),
                "generate/informative_share": self.num_informative / max(1, self.num_prompts),
                "generate/num_unused_prompts": float(self.num_informative - num_used),
            }
        )
