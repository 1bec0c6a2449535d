"""Interface of rollout engines: tokens in, tokens out, with log-prob and weight version of every generated token.

Trainer, generators and client know engines only through this file. It imports no engine and no Ray.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from skyrl_train.inference_engines.columns import (
    InferenceEngineInput,
    InferenceEngineOutput,
    RequestFailure,
    to_batch,
    to_completion,
    to_output,
    to_requests,
)
from skyrl_train.inference_engines.request import (
    Completion,
    DraftCounts,
    GenerationRequest,
    OnTokens,
    SamplingKeywords,
    StopReason,
    TokenDelta,
    TopLogProbs,
)
from skyrl_train.utils.async_blocks import gather_or_cancel
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightUpdates

__all__ = [
    "WAKE_TAGS",
    "Completion",
    "DraftCounts",
    "EngineInfo",
    "Feature",
    "GenerationRequest",
    "InferenceEngineInput",
    "InferenceEngineInterface",
    "InferenceEngineOutput",
    "OnTokens",
    "PauseMode",
    "SamplingKeywords",
    "StopReason",
    "TokenDelta",
    "TopLogProbs",
    "check_pause_mode",
    "check_sleep_level",
    "tags_to_wake",
]

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

    async def generate(self, request: GenerationRequest) -> Completion:
        """Continue a prompt. Cancelled, it ends the request. An engine defines this method, or `generate_batch`.

        Raises:
            ValueError: a token id outside the vocabulary, a prompt over the context, a bad sampling parameter.
            ConstraintFailed: the constraint became too complex within the answer.
        """
        if type(self).generate_batch is InferenceEngineInterface.generate_batch:
            raise NotImplementedError(f"{type(self).__name__} must define generate or generate_batch")
        return to_completion(await self.generate_batch(to_batch(request)))

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        """Continue a prompt as `generate` does, and hand out its tokens as they come, all but the last ones at the
        latest. The completion is the whole answer, equal to that of `generate`.

        Args:
            on_tokens: called in the caller's event loop. Tokens that it got stand: the answer begins with them.
        """
        return await self.generate(request)

    async def generate_batch(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Continue every prompt of a batch. A request that fails by itself fails alone (`failures`); any other error
        ends the requests of the whole batch."""

        async def outcome(request: GenerationRequest) -> Completion | Exception:
            try:
                return await self.generate(request)
            except RequestFailure as failure:
                return failure

        outcomes = await gather_or_cancel([outcome(request) for request in to_requests(input_batch)])
        return to_output(outcomes, input_batch.get("sampling_params") or {})

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
        return await self.generate_batch(
            InferenceEngineInput(prompt_token_ids=[prompt_token_ids] * num_samples, sampling_params=sampling_params)
        )
