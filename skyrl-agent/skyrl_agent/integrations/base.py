"""Backends: the model, the format of the trainer's rows, and the format of the output. Imported when they are named."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.types import InferBackend, JsonObject, Row, Tokenizer
from skyrl_gym.chat.template import turn_ends_of
from skyrl_gym.suggestions import did_you_mean

__all__ = ["BACKEND_REGISTRY", "Backend", "TrainingRows", "build_backend", "register_backend"]


@dataclass
class TrainingRows:
    """Batch for a trainer: R rows of T trajectories, each list in order. A trajectory has one row for each stretch of
    turns that only appended tokens; usually one."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    loss_masks: list[list[int]]
    rewards: list[float]
    """[R] the trajectory's, on each of its rows."""
    rollout_logprobs: list[list[float]] | None
    """[R][response]; 0.0 on tokens the model did not write. None if any written token of the batch has none."""
    is_last_episode: list[bool]
    """[R] the last row of its trajectory."""
    row_trajectory: list[int]
    """[R] index of the row's trajectory, in [0, T)."""
    traj_idx: list[str]
    """[R] `{instance_id}-traj{trajectory_id}`"""
    traj_rewards: list[float]
    """[T]"""
    episode_nums: list[int]
    """[T] rows of each."""
    finish_reasons: list[str]
    """[T]"""
    in_baseline: list[bool]
    """[T] False for infrastructure failures: their reward counts for nobody."""
    failures: list[Any]
    """[T] `types.Failure` or None."""
    weight_versions: list[list[int]] | None
    """[R][response]; -1 on tokens the model did not write."""
    rollout_metrics: dict[str, float]
    groups: list[int]
    """[T] the trajectory's instance, by its position in the batch (ids need not differ)."""
    instance_ids: list[str]
    """[T]"""
    trajectory_ids: list[int]
    """[T]"""


@dataclass(frozen=True)
class Backend:
    """Model client with input and output formats.

    Args:
        make: (infer_engine, tokenizer, cfg) -> the model.
        rows_of: input of `AgentRunner.run` -> rows, one per instance.
        output_of: the batch's rows -> output for the trainer.
    """

    make: Callable[..., InferBackend]
    rows_of: Callable[[Any], Sequence[Row]]
    output_of: Callable[[TrainingRows], Any]


BACKEND_REGISTRY: dict[str, str | Backend] = {
    "skyrl-train": "skyrl_agent.integrations.skyrl_train.skyrl_train_backend:BACKEND",
    "tinker": "skyrl_agent.integrations.tinker.tinker_backend:BACKEND",
    "openai_server": "skyrl_agent.integrations.openai:BACKEND",
}
"""Name -> backend, or `module:NAME` of one that is imported when it is first asked for."""


def register_backend(name: str, backend: Backend) -> None:
    """Register a backend, or the dotted path of one."""
    BACKEND_REGISTRY[name] = backend


def get_backend(name: str) -> Backend:
    """
    Raises:
        ConfigError: unknown, or a package it needs is not installed.
    """
    if name not in BACKEND_REGISTRY:
        raise ConfigError(f"Unknown backend: generator.infer_backend={name!r}; {did_you_mean(name, BACKEND_REGISTRY)}")
    found = BACKEND_REGISTRY[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"generator.infer_backend={name!r} needs {error.name}, which is not installed; install the extra of "
                "skyrl-agent for this backend"
            ) from error
        BACKEND_REGISTRY[name] = found
    return found


def build_backend(
    name: str, *, infer_engine: object, tokenizer: Tokenizer, cfg: JsonObject | None = None
) -> InferBackend:
    """Build the client of a registered backend."""
    return get_backend(name).make(infer_engine=infer_engine, tokenizer=tokenizer, cfg=cfg or {})


class BackendSettings(BaseModel):
    """Base class of a backend's settings (`generator.backend_config`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Settings = TypeVar("Settings", bound=BackendSettings)


def read_settings(kind: type[Settings], cfg: Mapping[str, object]) -> Settings:
    """
    Raises:
        ConfigError: a key of `generator.backend_config` is unknown or its value wrong.
    """
    try:
        return kind.model_validate(dict(cfg))
    except ValidationError as error:
        item = error.errors()[0]
        key = "generator.backend_config" + "".join(f".{part}" for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields) or "none"
            raise ConfigError(f"unknown key {key}; this backend has: {known}") from None
        raise ConfigError(f"{key}: {item['msg']}; got {item['input']!r}") from None


def decode_response(tokenizer: Tokenizer, ids: Sequence[int], finish_reason: str) -> str:
    """Decode the generated tokens, special ones included, without the token that ended the turn."""
    if finish_reason == "stop" and turn_ends_of(tokenizer).are_in(ids):
        ids = ids[:-1]
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def compute_turn_seed(seed: int, input_ids: Sequence[int]) -> int:
    """Derive the 31-bit seed of a turn: different per turn of a trajectory, equal when the turn is sampled again."""
    digest = hashlib.sha256(repr((seed, len(input_ids), input_ids[-1:])).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def plain_rows(batch: Iterable[Row]) -> list[Row]:
    """Convert a list or dataset of rows without changes.

    Raises:
        TaskRowError: one is no mapping.
    """
    rows = list(batch)
    for position, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TaskRowError(f"row {position} of the batch must be a mapping of fields; got {type(row).__name__}")
    return rows


def published_output(rows: TrainingRows) -> JsonObject:
    """Build the default output dictionary of `AgentRunner.run`."""
    return {
        "prompt_token_ids": rows.prompt_token_ids,
        "response_ids": rows.response_ids,
        "rewards": rows.rewards,
        "traj_rewards": rows.traj_rewards,
        "loss_masks": rows.loss_masks,
        "episode_nums": rows.episode_nums,
        "is_last_episode": rows.is_last_episode,
        "traj_idx": rows.traj_idx,
        "stop_reasons": [rows.finish_reasons[number] for number in rows.row_trajectory],
        "rollout_logprobs": rows.rollout_logprobs,
        "rollout_metrics": rows.rollout_metrics,
        "finish_reasons": rows.finish_reasons,
        "in_baseline": rows.in_baseline,
    }
