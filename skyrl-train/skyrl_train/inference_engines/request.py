"""Input and output of a rollout engine: a request with one prompt, and its completion.

Components between engines and generators use only these types; parallel columns for custom callers and engines are in
`columns.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.kept_tokens import KeptTokens

StopReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: the token budget or the context is exhausted.
`abort`: the request was aborted; the tokens so far are returned and can be continued.
"""

SamplingKeywords = dict[str, Any]
"""Sampling settings, the same keywords for every engine: `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`,
`repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `constraint`, `num_answer_tokens`, `stop`,
`stop_token_ids`, `ignore_eos`, `min_tokens`, `seed`, `logprobs`, `prompt_logprobs`, `skip_special_tokens`,
`return_kept_tokens` (`EngineTraits.kept_tokens`). An unknown one raises ValueError.

`seed` is a number or a [seed, index] pair; s alone means [s, 0]. `max_tokens` is at least 1; text that matches `stop`
stays in the response, as does a stop token. `logit_bias` is a mapping of token ids to numbers. `constraint` is a schema
or grammar of the entire completion (`constraints.py`): only permitted tokens are sampled, and the completion stops by
itself only where the constraint is satisfied. `num_answer_tokens` is the number of tokens at the end of the prompt that
already belong to the completion: constraint, frequency and presence penalty continue after them. `logprobs`: None, 0
(of the sampled token) or K (also of the K most likely tokens at its position, up to 20). `prompt_logprobs`: None, 0 (of
every prompt token but the first), or K (also of the K most likely tokens at its position).
"""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Examples:
        >>> request = GenerationRequest(prompt_token_ids=[5, 6, 7], sampling_params={"max_tokens": 3, "seed": [42, 1]})
        >>> len(request.prompt_token_ids), request.sampling_params["max_tokens"]
        (3, 3)
    """

    prompt_token_ids: list[int]
    sampling_params: SamplingKeywords = field(default_factory=dict)
    session_id: str | int | None = None
    """Requests of one session are sent to the same engine to reuse its prefix cache."""
    lora_name: str | None = None
    """Loaded adapter that generates (its tokens carry the adapter's version); None: the base model. An unknown name
    raises ValueError."""
    count_cached_tokens: bool = False
    """Return `num_cached_prompt_tokens` and `drafts`, which, unlike the rest of a completion, depend on other requests.
    """


class TopLogProbs(NamedTuple):
    """Most likely tokens at each of T positions of a completion, or of a prompt without its first token."""

    ids: np.ndarray
    """[T, K] int, most likely first."""
    log_probs: np.ndarray
    """[T, K] float32."""


def stack_top_log_probs(places: Sequence[tuple[np.ndarray, np.ndarray]], num_top: int) -> TopLogProbs | None:
    """Stack the ids and log-probs [K] of all positions; None if K = `num_top` is 0."""
    if not num_top:
        return None
    if not places:
        return build_top_log_probs([], num_top)
    ids, log_probs = zip(*places, strict=True)
    return TopLogProbs(np.stack(ids), np.stack(log_probs))


def join_top_log_probs(parts: Sequence[TopLogProbs]) -> TopLogProbs:
    """Concatenate the most likely tokens of successive parts."""
    return TopLogProbs(np.concatenate([part.ids for part in parts]), np.concatenate([part.log_probs for part in parts]))


def build_top_log_probs(places: Sequence[Sequence[tuple[int, float]]], num_top: int) -> TopLogProbs:
    """Build from (token, log-prob) pairs of each position, in any order and including the position's own token."""
    best = [sorted(place, key=lambda entry: -entry[1])[:num_top] for place in places]
    ids = np.array([[token for token, _ in place] for place in best], np.int64).reshape(len(best), num_top)
    values = np.array([[value for _, value in place] for place in best], np.float32).reshape(len(best), num_top)
    return TopLogProbs(ids, values)


class TokenDelta(NamedTuple):
    """New tokens of a stream. The columns have one entry per token."""

    token_ids: list[int]
    log_probs: list[float] | None
    weight_versions: list[int]
    top: TopLogProbs | None = None


OnTokens = Callable[[TokenDelta], None]
"""Callback for the tokens of a stream. It must not block."""


def join_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Join at least one successive deltas of one stream."""
    if len(deltas) == 1:
        return deltas[0]
    log_probs = [delta.log_probs for delta in deltas if delta.log_probs is not None]
    top = [delta.top for delta in deltas if delta.top is not None]
    return TokenDelta(
        [token for delta in deltas for token in delta.token_ids],
        [value for part in log_probs for value in part] if log_probs else None,
        [version for delta in deltas for version in delta.weight_versions],
        join_top_log_probs(top) if top else None,
    )


class DraftCounts(NamedTuple):
    """Speculative decoding of a request."""

    num_drafted: int
    """Draft tokens that were verified."""
    num_accepted: int
    """Accepted draft tokens in the completion."""


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine generated for one prompt. All lists except `prompt_log_probs` have one entry per token.

    Examples:
        >>> completion = Completion([8, 9, 2], "stop", weight_versions=[4, 4, 5], log_probs=[-0.1, -2.0, -0.3])
        >>> len(completion.token_ids) == len(completion.weight_versions) == len(completion.log_probs)
        True
    """

    token_ids: list[int]
    stop_reason: str
    """A `StopReason`."""
    weight_versions: list[int]
    """Version of the weights that generated each token."""
    log_probs: list[float] | None = None
    """log softmax(logits / temperature) at each generated token (temperature 1 if sampling is greedy), before
    penalties, biases, constraints and truncation (top-p, top-k, min-p): the distribution the trainer computes. With
    `return_kept_tokens` renormalized over the kept tokens. None if not requested.
    """
    text: str = ""
    prompt_log_probs: list[float] | None = None
    """Log-prob of every prompt token but the first, under the same distribution; None if not requested."""
    prompt_top: TopLogProbs | None = None
    """Most likely tokens at each prompt position but the first; None if not requested."""
    routes: ExpertRoutes | None = None
    """Experts that each token of prompt and completion was routed to, except the last, which no pass computed. None
    unless the engine was started to return them (`EngineTraits.expert_routes`).
    """
    kept_tokens: KeptTokens | None = None
    """Tokens that truncation kept at each position; None if not requested (`return_kept_tokens`)."""
    num_cached_prompt_tokens: int | None = None
    """Tokens at the beginning of the prompt that were not computed for this request: cached, or shared with another.
    None: not requested, or unknown."""
    drafts: DraftCounts | None = None
    """Speculative decoding; None: not requested, or unknown."""
    top: TopLogProbs | None = None
    """Most likely tokens at each position; None if not requested."""
