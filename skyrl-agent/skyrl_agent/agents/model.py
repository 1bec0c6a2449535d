"""One question to the model, with a deadline. Knows no dialogue."""

from skyrl_agent.agents.pending import Pending
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.errors import InfraError
from skyrl_agent.types import InferBackend, MetaInfo


class Model:
    def __init__(self, infer_engine: InferBackend, settings: GeneratorSection, pending: Pending) -> None:
        self.infer_engine, self.settings, self.pending = infer_engine, settings, pending

    async def answer(self, input_ids: list[int], room: int, request_id: str) -> tuple[str, MetaInfo]:
        """
        Args:
            room: tokens that the answer may have; `sampling_params.max_tokens` may be fewer.

        Raises:
            InfraError: the server failed, aborted the answer, or did not give it in time.
            BackendError: it refused the request.
        """
        params = dict(self.settings.sampling_params)
        params["max_tokens"] = min(params.get("max_tokens") or room, room)
        request = self.infer_engine.async_generate_ids(
            input_ids=input_ids, sampling_params=params, request_id=request_id
        )
        try:
            text, meta = await self.pending.before(self.settings.request_timeout_seconds, request)
        except (TimeoutError, InterruptedError) as error:
            raise InfraError(f"the model's answer {error} (generator.request_timeout_seconds)") from error
        if meta["finish_reason"] == "abort":
            raise InfraError("the model's server aborted the answer")
        return text, meta
