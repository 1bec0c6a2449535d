"""What a rollout engine is: tokens in, tokens out, with the log-prob and the weight version of every token it wrote.

The trainer, the generators and the client know engines only through this file. It knows no engine, no Ray.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.types import ConversationType
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest

StopReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: the token budget or the context is used up.
`abort`: the engine was told to stop; what was written so far is returned and may be continued."""

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests at a pause. `keep`: they stay where they are and go on after resume. `wait`: they
run to their end first (no new ones start). `abort`: they return now, with what they wrote and stop reason `abort`."""


class InferenceEngineInput(TypedDict):
    """A batch of requests. Exactly one of `prompts` and `prompt_token_ids`; engines themselves take only the latter."""

    prompts: NotRequired[list[ConversationType] | None]
    prompt_token_ids: NotRequired[list[list[int]] | None]
    sampling_params: NotRequired[dict[str, Any] | None]
    """The engine's keywords (`max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `stop`,
    `stop_token_ids`, `ignore_eos`, `min_tokens`, `seed`, `logprobs`). Request i of a batch with `seed` s uses (s,
    i); `seed` may also be a list of such pairs, one a request, so that a batch can be split or sent again."""
    session_ids: NotRequired[list[str | int] | None]
    """Requests of one session go to one engine, so that its prefix cache is of use."""


class InferenceEngineOutput(TypedDict):
    """Answers in the order of the requests."""

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    """log softmax(logits / temperature) at each written token (temperature 1 if sampling is greedy), before penalties
    and truncation (top-p, top-k, min-p): the distribution the trainer computes."""
    weight_versions: list[list[int]]
    """The version of the weights that wrote each token."""


class InferenceEngineInterface(ABC):
    """One engine, or a client over many. Every coroutine ends: with an answer, or with an error."""

    @abstractmethod
    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Continues every prompt. A token id outside the vocabulary or a prompt over the context raises ValueError."""

    @abstractmethod
    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Returns when no request is being computed. Requests that arrive while paused wait for `resume_generation`."""

    @abstractmethod
    async def resume_generation(self) -> None: ...

    @abstractmethod
    async def abort_generation(self) -> None:
        """Ends every running and waiting request with stop reason `abort`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Gives memory back while the trainer works: 1 keeps the weights in host memory, 2 drops them (a full weight
        update must follow `wake_up`). Refused while requests run."""

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undoes `sleep`. `tags` picks what comes back: `weights`, `kv_cache`; None means both."""

    @abstractmethod
    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None: ...

    @abstractmethod
    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Receives one chunk of named parameters and copies it in place."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> int:
        """After the last chunk: drops cached prefixes, takes on `version`, returns the checksum of the weights as the
        engine now holds them (`skyrl_train.weight_sync.checksum.checksum_of`)."""

    @abstractmethod
    async def weight_version(self) -> int: ...

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
        self, prompt_token_ids: list[int], num_samples: int, sampling_params: dict[str, Any]
    ) -> InferenceEngineOutput:
        """`num_samples` continuations of one prompt."""
        return await self.generate(
            InferenceEngineInput(prompt_token_ids=[prompt_token_ids] * num_samples, sampling_params=sampling_params)
        )
