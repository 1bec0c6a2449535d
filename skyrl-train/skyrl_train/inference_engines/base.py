"""Interface of rollout engines: token ids in and out, with log-prob and weight version of every generated token.

Trainer, generators and client use engines only through this interface. It imports neither an engine nor Ray.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from skyrl_gym.concurrency import gather_or_cancel
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
"""Treatment of running requests at a pause. `keep`: they stay and continue after resume. `wait`: they finish first (new
ones do not start). `abort`: they return immediately with the tokens so far and stop reason `abort`.
"""

WAKE_TAGS = ("weights", "kv_cache")
"""Kinds of memory that `wake_up` can restore separately."""


def check_pause_mode(mode: str) -> None:
    """Raise ValueError if `mode` is not a `PauseMode`."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode must be one of {', '.join(get_args(PauseMode))}; got {mode!r}")


def check_sleep_level(level: int) -> None:
    """Raise ValueError if `level` is neither 1 nor 2."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped); got {level!r}")


def tags_to_wake(tags: Sequence[str] | None) -> list[str]:
    """Return the tags given to `wake_up`, all `WAKE_TAGS` for None. Raises ValueError for an unknown tag."""
    for tag in tags or ():
        if tag not in WAKE_TAGS:
            raise ValueError(f"wake_up tags must be among {', '.join(WAKE_TAGS)}; got {tag!r}")
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
of this kind. `answer_tokens`: `num_answer_tokens`; without it, an interrupted completion that depends on it is
    restarted. `streaming`: `stream` delivers tokens as they are generated; a client requests a streamed completion in
    pieces from other engines.
Tokens in and out, log-probs, aborts, weight versions and health checks are mandatory."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Description of an engine."""

    backend: str
    """Registered name of the engine kind."""
    release: str
    """Version of the library."""
    model: str
    """Path or name of the model, as given to the engine (for a server: the served model)."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_model_len: int
    """Maximum number of tokens of a prompt and its response."""
    dtype: str | None
    """`bfloat16`, `float16`, `float32`; None if not reported."""
    num_weight_processes: int = 1
    """Processes that take part in a weight broadcast: tensor- x pipeline- x data-parallel size."""
    node: str | None = None
    """Ray node or host of the shared memory that the engine can access; None: another machine, or unknown."""
    gpus: Sequence[str] = ()
    """UUIDs of the GPUs of its weight processes; empty on a CPU, or if unknown."""
    unsupported: Mapping[Feature, str] = field(default_factory=dict)
    """Unsupported feature -> reason (an issue or a source line). A request for it raises `UnsupportedByEngine`."""


class InferenceEngineInterface(WeightUpdates):
    """Interface of one engine, or of a client over many. Every coroutine ends with a result or an error."""

    @abstractmethod
    async def describe(self) -> EngineInfo: ...

    @abstractmethod
    async def check_health(self) -> None:
        """Wait until the engine reports that it is healthy, possibly after a long step. The caller sets the deadline;
        see `progress`.

        Raises:
            WorkerError: the engine has failed.
        """

    def progress(self) -> int:
        """Return a counter that grows while the engine computes; thread-safe. It distinguishes a busy engine
        (unresponsive, but the counter grows) from one that hangs. 0 if not available.
        """
        return 0

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate the completion of a prompt. Cancelling the coroutine ends the request. An engine defines this method
        or `generate_batch`.

        Raises:
            ValueError: a token id outside the vocabulary, a prompt longer than the context, an invalid sampling
                parameter.
            ConstraintFailed: the constraint became too complex within the answer.
        """
        if type(self).generate_batch is InferenceEngineInterface.generate_batch:
            raise NotImplementedError(f"{type(self).__name__} must define generate or generate_batch")
        return to_completion(await self.generate_batch(to_batch(request)))

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        """Generate a completion as `generate` does, and deliver its tokens while it runs; the last ones may be
        delivered only with the result. The result is the entire completion, as from `generate`.

        Args:
            on_tokens: called in the caller's event loop. Delivered tokens are final: the completion begins with them.
        """
        return await self.generate(request)

    async def generate_batch(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Generate completions of all prompts of a batch. A request-specific error fails that request alone
        (`failures`); any other error ends the requests of the whole batch.
        """

        async def outcome(request: GenerationRequest) -> Completion | Exception:
            try:
                return await self.generate(request)
            except RequestFailure as failure:
                return failure

        outcomes = await gather_or_cancel([outcome(request) for request in to_requests(input_batch)])
        return to_output(outcomes, input_batch.get("sampling_params") or {})

    @contextmanager
    def announced(self, groups: Sequence[Sequence[str | int]]) -> Iterator[None]:
        """Declare sessions (`session_ids`) with requests that follow one by one within this context, so that a client
        over many engines divides them evenly. No effect for one engine.

        Args:
            groups: sessions with the same prompt.
        """
        yield

    @abstractmethod
    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Pause, and wait until no request is computed. New requests wait for `resume_generation`."""

    @abstractmethod
    async def resume_generation(self) -> None: ...

    @abstractmethod
    async def abort_generation(self) -> None:
        """End every running and waiting request with stop reason `abort`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Release memory for the trainer. Level 1 keeps the weights in host memory, level 2 drops them (a full weight
        update must follow `wake_up`). Raises an error while requests run.
        """

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`. `tags` selects the memory to restore: `weights`, `kv_cache`; None means both."""

    @abstractmethod
    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        """Load an adapter from a folder, replacing one with the same name. Requests with this name use it from now on,
        with weight version `request.version`.
        """

    @abstractmethod
    async def unload_lora(self, name: str) -> None:
        """Unload an adapter once running requests that use it have ended. An unknown name raises ValueError."""

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
