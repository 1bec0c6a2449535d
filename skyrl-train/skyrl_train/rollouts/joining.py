"""Joining the samples of a step-wise trajectory. Pure functions; one with a single sample passes through unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from skyrl_train.expert_routes import ExpertRoutes, join_routes
from skyrl_train.kept_tokens import KeptTokens, join_kept_tokens
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample, Trajectory


def merge_appending_turns(trajectory: Trajectory) -> Trajectory:
    """Join turns that only append, so that no token is computed twice: a sample whose prompt begins with the whole
    sample before (its prompt and its response) is joined to that one; where a prompt does not, a new sample starts.

    Tokens between two joined responses get loss mask 0, reward 0, log-prob 0 and weight version -1. A conversation that
    only ever appends (and whose every answer has a token) becomes the sample that it is without step-wise trajectories.
    """
    if len(trajectory.samples) == 1:
        return trajectory
    runs: list[list[TrainingSample]] = [[trajectory.samples[0]]]
    for sample in trajectory.samples[1:]:
        if _tokens_between(runs[-1][-1], sample) is None:
            runs.append([sample])
        else:
            runs[-1].append(sample)
    return replace(trajectory, samples=[join_samples(run) for run in runs])


def whole_sample(trajectory: Trajectory) -> TrainingSample:
    """Return all turns of a trajectory as one sample, for metrics and for people to read. Where a turn's prompt does
    not begin with the turn before (the history was rewritten), its response simply follows."""
    return join_samples(trajectory.samples)


def join_samples(samples: Sequence[TrainingSample]) -> TrainingSample:
    """Return one sample: the first prompt, then all responses with the tokens that stand between them."""
    first = samples[0]
    if len(samples) == 1:
        return first
    ids, mask, rewards = list(first.response_ids), list(first.loss_mask), list(first.rewards)
    log_probs: list[float] = list(first.log_probs or [])
    versions: list[int] = list(first.weight_versions or [])
    kept = [_kept_tokens(first)]
    for before, sample in pairwise(samples):
        between = _tokens_between(before, sample) or []
        ids += between + sample.response_ids
        mask += [0] * len(between) + sample.loss_mask
        rewards += [0.0] * len(between) + sample.rewards
        log_probs += [0.0] * len(between) + (sample.log_probs or [])
        versions += [NO_VERSION] * len(between) + (sample.weight_versions or [])
        kept += [KeptTokens.whole_vocabulary(len(between)), _kept_tokens(sample)]
    return TrainingSample(
        prompt_ids=first.prompt_ids,
        response_ids=ids,
        loss_mask=mask,
        rewards=rewards,
        log_probs=None if any(sample.log_probs is None for sample in samples) else log_probs,
        weight_versions=None if any(sample.weight_versions is None for sample in samples) else versions,
        routes=_joined_routes(samples),
        kept_tokens=None if any(sample.kept_tokens is None for sample in samples) else join_kept_tokens(kept),
    )


def _kept_tokens(sample: TrainingSample) -> KeptTokens:
    return sample.kept_tokens or KeptTokens.whole_vocabulary(len(sample.response_ids))


def _joined_routes(samples: Sequence[TrainingSample]) -> ExpertRoutes | None:
    """Return the routes of samples that were joined; of the first alone where the history was rewritten, since later
    ones then belong to other places."""
    is_appending = all(_tokens_between(before, sample) is not None for before, sample in pairwise(samples))
    return join_routes([sample.routes for sample in samples]) if is_appending else samples[0].routes


def _tokens_between(before: TrainingSample, sample: TrainingSample) -> list[int] | None:
    """Return the tokens between the response of `before` and that of `sample`; None if the prompt of `sample` does not
    begin with the whole of `before`."""
    beginning = before.prompt_ids + before.response_ids
    prompt = sample.prompt_ids
    return prompt[len(beginning) :] if prompt[: len(beginning)] == beginning else None
