"""Interface of rollout engines: tokens in, tokens out, with log-prob and weight version of every generated token.

Trainer, generators and client know engines only through this file. It imports no engine and no Ray.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

import numpy as np

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.types import ConversationType
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightUpdates

StopReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: the token budget or the context is used up.
`abort`: the engine was told to stop; what was written so far is returned and may be continued.
`error`: this request failed, others of its call did not (`InferenceEngineOutput.failures`); it has no token."""

PauseMode = Literal["keep", "wait", "abort"]
"""Treatment of running requests at a pause. `keep`: they stay and continue after resume. `wait`: they run to their end
first (no new ones start). `abort`: they return now, with the tokens so far and stop reason `abort`."""

WAKE_TAGS = ("weights", "kv_cache")
"""Kinds of memory that `wake_up` may bring back one at a time."""


def check_pause_mode(mode: str) -> None:
    """Raise ValueError if `mode` is no `PauseMode`."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode must be one of {', '.join(get_args(PauseMode))}; got {mode!r}")


def check_sleep_level(level: int) -> None:
    """Raise ValueError if `level` is neither 1 nor 2."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped); got {level!r}")


def tags_to_wake(tags: Sequence[str] | None) -> list[str]:
    """Return the tags given to `wake_up`, all `WAKE_TAGS` for None. Raises ValueError for another tag."""
    for tag in tags or ():
        if tag not in WAKE_TAGS:
            raise ValueError(f"wake_up tags must be of {', '.join(WAKE_TAGS)}; got {tag!r}")
    return list(WAKE_TAGS if tags is None else tags)


Feature = Literal[
    "seed",
    "stop_strings",
    "prompt_log_probs",
    "prompt_top_log_probs",
    "top_log_probs",
    "penalties",
    "logit_bias",
    "json_schema",
    "grammar",
    "answer_tokens",
    "weight_update",
    "lora",
    "pause_keep",
    "pause_wait",
    "sleep",
    "broadcast",
    "streaming",
]
"""Optional features. `penalties`: `frequency_penalty` and `presence_penalty`. `json_schema`, `grammar`: a `constraint`
of this kind. `answer_tokens`: `num_answer_tokens`; other engines generate an interrupted answer that depends on it
anew. `streaming`: `stream` hands out tokens as they come; a client asks other engines for a streamed answer in pieces.
Tokens in and out, log-probs, aborts, weight versions and health checks are mandatory."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Description of an engine."""

    backend: str
    """The registered name of its kind."""
    release: str
    """The library's version."""
    model: str
    """Path or name of the model, as given to the engine (a server: the model that it serves)."""
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    max_model_len: int
    """Maximum number of tokens of a prompt and its response."""
    dtype: str | None
    """`bfloat16`, `float16`, `float32`; None if the engine does not say."""
    num_weight_processes: int = 1
    """Processes that take part in a weight broadcast: tensor- x pipeline- x data-parallel size."""
    node: str | None = None
    """The Ray node or host whose shared memory the engine sees; None: another machine, or not known."""
    gpus: Sequence[str] = ()
    """UUIDs of the GPUs of its weight processes; empty on a CPU, or where they are not known."""
    unsupported: Mapping[Feature, str] = field(default_factory=dict)
    """Feature that this engine does not have -> reason (an issue or a line of its source). A request for it raises
    `UnsupportedByEngine`."""


SamplingKeywords = dict[str, Any]
"""Sampling settings, the same keywords for every engine: `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`,
`repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `constraint`, `num_answer_tokens`, `stop`,
`stop_token_ids`, `ignore_eos`, `min_tokens`, `seed`, `logprobs`, `prompt_logprobs`, `skip_special_tokens`,
`return_kept_tokens` (`EngineTraits.kept_tokens`). An unknown one raises ValueError.

Request i of a batch with `seed` s uses (s, i); `seed` may also be a list of such pairs, one for each request, so that a
batch can be split or sent again. `max_tokens` is at least 1; text that matches `stop` stays in the response, as does a
stop token. `logit_bias` is a mapping of token ids to numbers. `constraint` is a schema or grammar of the whole answer
(`constraints.py`): only tokens that it allows are drawn, and the response ends by itself only where it is satisfied.
`num_answer_tokens` tells how many tokens at the end of the prompt belong to the answer already: constraint, frequency
and presence penalty go on behind them. `logprobs`: None, 0 (of the token drawn) or K (besides, those of the K likeliest
tokens in its place, up to 20). `prompt_logprobs`: None, 0 (the log-prob of every prompt token but the first), or K
(besides, those of the K most likely tokens in its place)."""


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


class InferenceEngineInput(TypedDict):
    """A batch of requests. Exactly one of `prompts` and `prompt_token_ids`; engines themselves take only the latter."""

    prompts: NotRequired[list[ConversationType] | None]
    prompt_token_ids: NotRequired[list[list[int]] | None]
    sampling_params: NotRequired[SamplingKeywords | None]
    session_ids: NotRequired[list[str | int] | None]
    """Requests of one session go to one engine, so that its prefix cache is of use."""
    lora_name: NotRequired[str | None]
    """Loaded adapter that generates (its tokens carry the adapter's version); None: the base model. An unknown name
    raises ValueError."""
    count_cached_tokens: NotRequired[bool]
    """Ask for `num_cached_prompt_tokens` and `draft_counts`: unlike all else in an output, they depend on other
    requests."""


class InferenceEngineOutput(TypedDict):
    """Completions in the order of the requests."""

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    """log softmax(logits / temperature) at each generated token (temperature 1 if sampling is greedy), before
    penalties, biases, constraints and truncation (top-p, top-k, min-p): the distribution the trainer computes. With
    `return_kept_tokens` renormalized over the kept tokens."""
    response_top_logprobs: NotRequired[list[TopLogProbs] | None]
    """The K most likely tokens of that distribution in the place of each generated token, if asked for."""
    weight_versions: list[list[int]]
    """Version of the weights that generated each token."""
    prompt_logprobs: NotRequired[list[list[float]] | None]
    """Log-prob of each prompt token but the first, if asked for; of the same distribution (log softmax(logits /
    temperature))."""
    prompt_top_logprobs: NotRequired[list[TopLogProbs] | None]
    """The K most likely tokens in the place of each of them, of the same distribution, if asked for."""
    expert_routes: NotRequired[list[ExpertRoutes | None] | None]
    """Experts of a mixture that each token of prompt and response went to, but for the last token of the response,
    which no pass computed. From engines that were started to return them (`EngineTraits.expert_routes`)."""
    kept_tokens: NotRequired[list[KeptTokens | None] | None]
    """Tokens that truncation kept when each token of the response was drawn, if asked for (`return_kept_tokens`)."""
    num_cached_prompt_tokens: NotRequired[list[int] | None]
    """Number of tokens at the beginning of each prompt that were not computed for it: cached, or shared with another
    request. If asked for, from engines that know it."""
    draft_counts: NotRequired[list[DraftCounts] | None]
    """Speculative decoding of each request. If asked for, from engines that know it."""
    failures: NotRequired[list[Exception | None]]
    """Error of each request that failed; there only if one did. A call of which all requests fail raises the first."""


def raise_failures(output: InferenceEngineOutput) -> None:
    """Raise the first failure of a request, for callers that need every answer."""
    for failure in output.get("failures") or []:
        if failure is not None:
            raise failure


class InferenceEngineInterface(WeightUpdates):
    """One engine, or a client over many. Every coroutine ends, with a result or with an error."""

    @abstractmethod
    async def describe(self) -> EngineInfo: ...

    @abstractmethod
    async def check_health(self) -> None:
        """Wait until the engine answers that it is well: soon, or after a long step. The caller sets the deadline; see
        `progress`.

        Raises:
            WorkerError: the engine has failed.
        """

    def progress(self) -> int:
        """Return a number that grows while the engine computes, for any thread to read. It distinguishes a busy engine
        (silent, but the number grows) from one that hangs. 0 for engines that do not know."""
        return 0

    @abstractmethod
    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Continue every prompt. A token id outside the vocabulary or a prompt over the context raises ValueError. An
        answer that fails by itself (a constraint that became too complex) fails alone: see `failures`."""

    async def stream(self, input_batch: InferenceEngineInput, on_tokens: OnTokens) -> InferenceEngineOutput:
        """Continue one prompt as `generate` does, and hand out its tokens as they come, all but the last ones at the
        latest. The output is the whole answer, equal to that of `generate`. Cancelled, it ends the request.

        Args:
            input_batch: of one prompt.
            on_tokens: called in the caller's event loop. Tokens that it got stand: the answer begins with them.
        """
        return await self.generate(input_batch)

    @contextmanager
    def announced(self, groups: Sequence[Sequence[str | int]]) -> Iterator[None]:
        """Announce sessions (`session_ids`) whose requests come one by one within this context, so that a client over
        many engines divides them evenly. One engine has nothing to divide.

        Args:
            groups: sessions with the same prompt.
        """
        yield

    @abstractmethod
    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Pause, and wait until no request is being computed. New requests wait for `resume_generation`."""

    @abstractmethod
    async def resume_generation(self) -> None: ...

    @abstractmethod
    async def abort_generation(self) -> None:
        """End every running and waiting request with stop reason `abort`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Release memory for the trainer: level 1 keeps the weights in host memory, 2 drops them (a full weight update
        must follow `wake_up`). Refused while requests run."""

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`. `tags` selects what comes back: `weights`, `kv_cache`; None means both."""

    @abstractmethod
    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        """Load an adapter from a folder, in place of one with the same name; requests that name it use it from now on,
        under `request.version`."""

    @abstractmethod
    async def unload_lora(self, name: str) -> None:
        """Unload an adapter after the running requests that use it. An unknown name raises ValueError."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def teardown(self) -> None: ...

    def tp_size(self) -> int:
        return 1

    def pp_size(self) -> int:
        return 1

    def dp_size(self) -> int:
        return 1

    async def sample(
        self, prompt_token_ids: list[int], num_samples: int, sampling_params: SamplingKeywords
    ) -> InferenceEngineOutput:
        """Generate `num_samples` continuations of one prompt."""
        return await self.generate(
            InferenceEngineInput(prompt_token_ids=[prompt_token_ids] * num_samples, sampling_params=sampling_params)
        )
