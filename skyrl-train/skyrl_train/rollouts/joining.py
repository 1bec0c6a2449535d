"""Merging of the samples of a step-wise trajectory. Pure functions; a trajectory with a single sample is returned
unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from skyrl_gym.chat.turns import TurnTokens, get_tokens_between, join_column, join_optional_column, split_appending
from skyrl_train.expert_routes import ExpertRoutes, join_routes
from skyrl_train.kept_tokens import KeptTokens, join_kept_tokens
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample, Trajectory


def merge_appending_turns(trajectory: Trajectory) -> Trajectory:
    """Merge turns that only append, so that no token is computed twice: a sample whose prompt starts with the previous
    sample (prompt and response) is merged into it; otherwise a new sample starts.

    Tokens between two merged responses get loss mask 0, reward 0, log-prob 0 and weight version -1. A conversation that
    only appends (and has no empty response) becomes the same sample as without step-wise trajectories.
    """
    if len(trajectory.samples) == 1:
        return trajectory
    runs = split_appending(trajectory.samples, _get_tokens)
    return replace(trajectory, samples=[join_samples(run) for run in runs])


def merge_all_turns(trajectory: Trajectory) -> TrainingSample:
    """Merge all turns of a trajectory into one sample, for metrics and for display. If a turn's prompt does not start
    with the previous turn (the history was rewritten), its response is appended directly."""
    return join_samples(trajectory.samples)


def join_samples(samples: Sequence[TrainingSample]) -> TrainingSample:
    """Join samples: the first prompt, then all responses with the tokens between them."""
    first = samples[0]
    if len(samples) == 1:
        return first
    between = [get_tokens_between(_get_tokens(one), _get_tokens(other)) or [] for one, other in pairwise(samples)]
    gaps = [len(tokens) for tokens in between]
    ids = list(first.response_ids)
    for tokens, sample in zip(between, samples[1:], strict=True):
        ids += tokens + sample.response_ids
    return TrainingSample(
        prompt_ids=first.prompt_ids,
        response_ids=ids,
        loss_mask=join_column([sample.loss_mask for sample in samples], gaps, 0),
        rewards=join_column([sample.rewards for sample in samples], gaps, 0.0),
        log_probs=join_optional_column([sample.log_probs for sample in samples], gaps, 0.0),
        weight_versions=join_optional_column([sample.weight_versions for sample in samples], gaps, NO_VERSION),
        routes=_join_sample_routes(samples),
        kept_tokens=_join_kept_tokens(samples, gaps),
    )


def _join_kept_tokens(samples: Sequence[TrainingSample], gaps: Sequence[int]) -> KeptTokens | None:
    parts: list[KeptTokens] = []
    for gap, sample in zip([0, *gaps], samples, strict=True):
        if sample.kept_tokens is None:
            return None
        parts += [KeptTokens.full_vocabulary(gap), sample.kept_tokens]
    return join_kept_tokens(parts)


def _join_sample_routes(samples: Sequence[TrainingSample]) -> ExpertRoutes | None:
    """Join the routes of merged samples; keep only the first sample's routes if the history was rewritten, since later
    routes then belong to other positions."""
    is_appending = len(split_appending(samples, _get_tokens)) == 1
    return join_routes([sample.routes for sample in samples]) if is_appending else samples[0].routes


def _get_tokens(sample: TrainingSample) -> TurnTokens:
    return sample.prompt_ids, sample.response_ids
