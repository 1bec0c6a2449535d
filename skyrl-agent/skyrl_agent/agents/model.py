"""Requests to the model, with a deadline. Independent of conversations."""

from collections.abc import Mapping

from skyrl_agent.agents.pending import Pending
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.errors import InfraError
from skyrl_agent.types import InferBackend, MetaInfo


class Model:
    """Client of a backend's model, with a deadline per request.

    Args:
        extra_params: override `settings.sampling_params`.
    """

    def __init__(
        self,
        infer_engine: InferBackend,
        settings: GeneratorSection,
        pending: Pending,
        extra_params: Mapping[str, object],
    ) -> None:
        self.infer_engine, self.pending = infer_engine, pending
        self.seconds = settings.request_timeout_seconds
        self.params = {**settings.sampling_params, **extra_params}

    async def answer(self, input_ids: list[int], room: int, request_id: str) -> tuple[str, MetaInfo]:
        """Request the completion of `input_ids`.

        Args:
            room: limit of the answer's tokens, besides `sampling_params.max_tokens`.

        Raises:
            InfraError: the server failed, aborted the completion, or timed out.
            BackendError: it refused the request.
        """
        params = self.params | {"max_tokens": min(self.params.get("max_tokens") or room, room)}
        request = self.infer_engine.async_generate_ids(
            input_ids=input_ids, sampling_params=params, request_id=request_id
        )
        try:
            text, meta = await self.pending.before(self.seconds, request)
        except TimeoutError as error:
            raise InfraError(f"the model's completion {error} (generator.request_timeout_seconds)") from error
        except InterruptedError as error:
            raise InfraError(f"the model's completion {error}") from error
        if meta["finish_reason"] == "abort":
            raise InfraError("the model's server aborted the completion")
        return text, meta
