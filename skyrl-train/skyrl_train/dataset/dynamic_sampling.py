"""Dynamic sampling: batches of prompts are sampled until one is full of prompts whose answers differ in reward (DAPO,
https://arxiv.org/abs/2503.14476, section 3.2).

Which rows are kept is decided in `algorithms.sampling`; here rows are moved. Nothing of it outlives a step: what was
sampled and not used is counted and dropped.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from loguru import logger

from skyrl_train.algorithms.sampling import Selection, keep_informative, replace_uninformative
from skyrl_train.config import DynamicSamplingConfig
from skyrl_train.errors import SkyRLError
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.generators.batches import concatenate_generator_outputs
from skyrl_train.generators.metrics import check_not_all_failed, get_metrics_from_generator_output
from skyrl_train.generators.rewards import total_reward

Sampled = tuple[GeneratorOutput, list[str]]
"""Trajectories, and the uid of the prompt behind each."""

_SETTING = "trainer.algorithm.dynamic_sampling"
_COUNTED = ("generate/num_failed/", "generate/num_retries")


async def sample_batch(
    ask: Callable[[int], Awaitable[Sampled]],
    settings: DynamicSamplingConfig,
    num_prompts: int,
    generator: torch.Generator,
) -> tuple[GeneratorOutput, list[str], dict[str, float]]:
    """One full batch, and what it took.

    Args:
        ask: samples one more batch of prompts; gets the number of batches sampled before.
        num_prompts: of a full batch.
        generator: of the draws of `replace`.

    Returns:
        The trajectories to train on, the uid of the prompt of each, and metrics. `generate/` metrics are of what is
        trained on, but failures and retries, which are counted over all that was sampled.

    Raises:
        SkyRLError: `max_sample_batches` batches did not fill one.
    """
    if settings.type is None:
        output, uids = await ask(0)
        return output, uids, {}
    kept: list[Sampled] = []
    tally = _Tally()
    while settings.max_sample_batches <= 0 or tally.num_batches < settings.max_sample_batches:
        sampled = await ask(tally.num_batches)
        if settings.type == "filter":
            informative = selected(*sampled, keep_informative(scores_of(*sampled), sampled[1]))
            tally.add(sampled, informative)
            kept += [informative] if informative[1] else []
            if tally.num_informative >= num_prompts:
                return *_joined(kept, num_prompts), tally.metrics(num_prompts)
        else:
            tally.add(sampled, selected(*sampled, keep_informative(scores_of(*sampled), sampled[1])))
            selection = replace_uninformative(scores_of(*sampled), sampled[1], settings.min_replace_ratio, generator)
            if selection is not None:
                return *selected(*sampled, selection), tally.metrics(tally.last_informative)
        logger.info(
            f"dynamic sampling: {tally.num_informative} of {tally.num_prompts} prompts sampled for this step have "
            "answers that differ in reward; sampling another batch"
        )
    raise SkyRLError(
        f"{_SETTING}.type={settings.type} did not fill a batch of {num_prompts} prompts: {tally.num_batches} batches "
        f"({_SETTING}.max_sample_batches={settings.max_sample_batches}) of {tally.num_prompts} prompts in all gave "
        f"{tally.num_informative} whose answers differ in reward. The problems are too easy or too hard for this "
        "policy: change the data, raise generator.n_samples_per_prompt or max_sample_batches, or lower "
        "trainer.train_batch_size"
        + ("" if settings.type == "filter" else f" or min_replace_ratio (now {settings.min_replace_ratio})")
    )


def told_apart(prompts: Sequence[dict[str, Any]], seen: set[str]) -> list[dict[str, Any]]:
    """The prompts, with another uid where one was seen before in this step: a prompt that comes again (when an epoch
    ends within the step) is another group, with answers of its own. Adds the uids to `seen`."""
    rows = []
    for row in prompts:
        uid, number = row["uid"], 1
        while uid in seen:
            number += 1
            uid = f"{row['uid']}#{number}"
        seen.add(uid)
        rows.append(row | {"uid": uid})
    return rows


def scores_of(output: GeneratorOutput, uids: Sequence[str]) -> list[float | None]:
    """The reward of each trajectory; None for a failed one, and for the last of a group whose others failed: there is
    nothing left to compare it with."""
    failures = output.get("failures") or [None] * len(uids)
    sampled, valid = {uid: 0 for uid in uids}, {uid: 0 for uid in uids}
    for uid, failure in zip(uids, failures, strict=True):
        sampled[uid] += 1
        valid[uid] += failure is None
    return [
        None if failure is not None or valid[uid] < min(2, sampled[uid]) else total_reward(reward)
        for uid, failure, reward in zip(uids, failures, output["rewards"], strict=True)
    ]


def selected(output: GeneratorOutput, uids: Sequence[str], selection: Selection) -> Sampled:
    """Some rows of an output, each under the uid that the selection gives it. Metrics stay those of the whole."""
    columns: dict[str, Any] = {
        key: [column[row] for row in selection.rows] if isinstance(column, list) else column
        for key, column in output.items()
    }
    if columns.get("trajectory_ids") is not None:
        columns["trajectory_ids"] = [
            replace(trajectory_id, instance_id=str(uid))
            for trajectory_id, uid in zip(columns["trajectory_ids"], selection.uids, strict=True)
        ]
    return GeneratorOutput(**columns), [str(uid) for uid in selection.uids]


class _Tally:
    """What was sampled for one step."""

    def __init__(self) -> None:
        self.num_batches = self.num_prompts = self.num_informative = self.last_informative = 0
        self._num_scored = 0
        self._counts: dict[str, float] = {}
        self._reward = 0.0

    def add(self, sampled: Sampled, informative: Sampled) -> None:
        output, uids = sampled
        what = "a batch that was sampled failed, so there is nothing to choose from"
        check_not_all_failed(output.get("failures") or [], what)
        num_prompts = len(set(uids))
        self.num_batches += 1
        self.num_prompts += num_prompts
        self.last_informative = len(set(informative[1]))
        self.num_informative += self.last_informative
        score = get_metrics_from_generator_output(output, uids)["avg_score"]
        if score is not None:
            self._num_scored += num_prompts
            self._reward += num_prompts * score
        for name, value in (output["rollout_metrics"] or {}).items():
            if name.startswith(_COUNTED):
                self._counts[name] = self._counts.get(name, 0.0) + value

    def metrics(self, num_used: int) -> dict[str, float]:
        """`num_used`: informative prompts that are trained on."""
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


def _joined(kept: Sequence[Sampled], num_prompts: int) -> Sampled:
    """The first `num_prompts` prompts of what was kept."""
    output = concatenate_generator_outputs([output for output, _ in kept])
    uids = [uid for _, own in kept for uid in own]
    first = set(list(dict.fromkeys(uids))[:num_prompts])
    rows = [row for row, uid in enumerate(uids) if uid in first]
    return selected(output, uids, Selection(rows, [uids[row] for row in rows], len(first)))
