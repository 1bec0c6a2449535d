"""What goes to a rollout engine and what comes back: a request with one prompt, and its completion.

Every component between the engines and the generators has these two forms alone; parallel columns for callers and
engines of your own are in `columns.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.kept_tokens import KeptTokens

StopReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: the token budget or the context is used up.
`abort`: the engine was told to stop; what was written so far is returned and may be continued."""

SamplingKeywords = dict[str, Any]
"""Sampling settings, the same keywords for every engine: `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`,
`repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `constraint`, `num_answer_tokens`, `stop`,
`stop_token_ids`, `ignore_eos`, `min_tokens`, `seed`, `logprobs`, `prompt_logprobs`, `skip_special_tokens`,
`return_kept_tokens` (`EngineTraits.kept_tokens`). An unknown one raises ValueError.

`seed` is a number or a [seed, index] pair; s alone means [s, 0]. `max_tokens` is at least 1; text that matches `stop`
stays in the response, as does a stop token. `logit_bias` is a mapping of token ids to numbers. `constraint` is a schema
or grammar of the whole answer (`constraints.py`): only tokens that it allows are drawn, and the response ends by itself
only where it is satisfied.
`num_answer_tokens` tells how many tokens at the end of the prompt belong to the answer already: constraint, frequency
and presence penalty go on behind them. `logprobs`: None, 0 (of the token drawn) or K (besides, those of the K likeliest
tokens in its place, up to 20). `prompt_logprobs`: None, 0 (the log-prob of every prompt token but the first), or K
(besides, those of the K most likely tokens in its place)."""


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
    """Requests of one session go to one engine, so that its prefix cache is of use."""
    lora_name: str | None = None
    """Loaded adapter that generates (its tokens carry the adapter's version); None: the base model. An unknown name
    raises ValueError."""
    count_cached_tokens: bool = False
    """Ask for `num_cached_prompt_tokens` and `drafts`: unlike all else in a completion, they depend on other
    requests."""


class TopLogProbs(NamedTuple):
    """Most likely tokens in the place of each token of an answer, or of a prompt but for its first one. T tokens."""

    ids: np.ndarray
    """[T, K] int, likeliest first."""
    log_probs: np.ndarray
    """[T, K] float32."""


def stack_top_log_probs(places: Sequence[tuple[np.ndarray, np.ndarray]], num_top: int) -> TopLogProbs | None:
    """Arrange the ids and log-probs [K] of each place; None if K = `num_top` is 0."""
    if not num_top:
        return None
    if not places:
        return top_log_probs_of([], num_top)
    ids, log_probs = zip(*places, strict=True)
    return TopLogProbs(np.stack(ids), np.stack(log_probs))


def join_top_log_probs(parts: Sequence[TopLogProbs]) -> TopLogProbs:
    """Join those of successive tokens."""
    return TopLogProbs(np.concatenate([part.ids for part in parts]), np.concatenate([part.log_probs for part in parts]))


def top_log_probs_of(places: Sequence[Sequence[tuple[int, float]]], num_top: int) -> TopLogProbs:
    """Arrange tokens and log-probs of each position, in any order and with the position's own token among them."""
    best = [sorted(place, key=lambda entry: -entry[1])[:num_top] for place in places]
    ids = np.array([[token for token, _ in place] for place in best], np.int64).reshape(len(best), num_top)
    values = np.array([[value for _, value in place] for place in best], np.float32).reshape(len(best), num_top)
    return TopLogProbs(ids, values)


class TokenDelta(NamedTuple):
    """Further tokens of an answer that grows. The columns have one entry a token."""

    token_ids: list[int]
    log_probs: list[float] | None
    weight_versions: list[int]
    top: TopLogProbs | None = None


OnTokens = Callable[[TokenDelta], None]
"""Function that takes the tokens of an answer as they come. It returns at once."""


def join_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Join successive tokens of one answer, at least one delta."""
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
    """Those of them in the response."""


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine generated behind one prompt. The lists but `prompt_log_probs` have one entry a token.

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
    `return_kept_tokens` renormalized over the kept tokens. None if not asked for."""
    text: str = ""
    prompt_log_probs: list[float] | None = None
    """Log-prob of every prompt token but the first, of the same distribution; None if not asked for."""
    prompt_top: TopLogProbs | None = None
    """Most likely tokens in the place of each of them; None if not asked for."""
    routes: ExpertRoutes | None = None
    """Experts of a mixture that each token of prompt and completion went to, but for the last, which no pass computed.
    None unless the engine was started to return them (`EngineTraits.expert_routes`)."""
    kept_tokens: KeptTokens | None = None
    """Tokens that truncation kept when each was drawn; None if not asked for (`return_kept_tokens`)."""
    num_cached_prompt_tokens: int | None = None
    """Tokens at the beginning of the prompt that were not computed for this request: cached, or shared with another.
    None: not asked for, or not known."""
    drafts: DraftCounts | None = None
    """Speculative decoding; None: not asked for, or not known."""
    top: TopLogProbs | None = None
    """Most likely tokens in the place of each token; None if not asked for."""
