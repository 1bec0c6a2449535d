"""Conversion of sampling settings to engine keywords, and the seed of each request."""

import hashlib
from typing import TYPE_CHECKING

from skyrl_train.generators.base import BatchMetadata, TrajectoryID
from skyrl_train.inference_engines.base import SamplingKeywords

if TYPE_CHECKING:
    from skyrl_train.config import SamplingParams


def get_sampling_params(sampling_params_cfg: "SamplingParams") -> SamplingKeywords:
    """Convert `generator.sampling_params` or `generator.eval_sampling_params` to the engines' keywords."""
    params: SamplingKeywords = {
        "max_tokens": sampling_params_cfg.max_generate_length,
        "temperature": sampling_params_cfg.temperature,
        "top_p": sampling_params_cfg.top_p,
        "top_k": sampling_params_cfg.top_k,
        "min_p": sampling_params_cfg.min_p,
        "repetition_penalty": sampling_params_cfg.repetition_penalty,
        "logprobs": sampling_params_cfg.logprobs,
    }
    if sampling_params_cfg.stop:
        params["stop"] = list(sampling_params_cfg.stop)
    return params | dict(sampling_params_cfg.additional_kwargs or {})


def compute_request_seed(seed: int, metadata: BatchMetadata | None, trajectory_id: TrajectoryID, turn: int) -> int:
    """Return a 63-bit seed of one engine call: distinct for every batch (`BatchMetadata.seed`), sample and turn, equal
    in every process and after a resume."""
    return _compute_hash(seed, metadata, trajectory_id.instance_id, trajectory_id.repetition_id, turn)


def compute_episode_seed(seed: int, metadata: BatchMetadata | None, trajectory_id: TrajectoryID) -> int:
    """Return the seed of an environment's episode: equal for all samples of a prompt, since their rewards are
    compared."""
    return _compute_hash(seed, metadata, trajectory_id.instance_id, "episode")


def _compute_hash(seed: int, metadata: BatchMetadata | None, *what: object) -> int:
    batch = (metadata.training_phase, metadata.seed) if metadata else ("train", None)
    return int.from_bytes(hashlib.sha256(repr((seed, *batch, *what)).encode()).digest()[:8], "big") >> 1
