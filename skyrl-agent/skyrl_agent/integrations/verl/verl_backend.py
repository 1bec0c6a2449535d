"""A server client of verl as the model, and its `DataProto` as rows. Not run here: it needs verl and a GPU."""

from collections.abc import Mapping
from typing import Any

from skyrl_agent.errors import BackendError, InfraError
from skyrl_agent.integrations.base import (
    Backend,
    BackendSettings,
    answer_text,
    plain_rows,
    published_output,
    read_settings,
)
from skyrl_agent.types import MetaInfo, Row, SamplingParams, Tokenizer

__all__ = ["BACKEND", "VeRLBackend"]


class VeRLBackend:
    """
    Args:
        infer_engine: has `generate(request_id=, prompt_ids=, sampling_params=)`, which gives an object with
            `token_ids`, `log_probs` and `stop_reason`, or (text, meta) as servers of the published fork do.
    """

    def __init__(self, infer_engine: Any, tokenizer: Tokenizer, cfg: Mapping[str, object] | None = None) -> None:
        read_settings(BackendSettings, cfg or {})
        self.client, self.tokenizer = infer_engine, tokenizer

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        params = {"logprobs": True, **sampling_params}
        most = params.get("max_tokens")
        try:
            answer = await self.client.generate(
                request_id=request_id, prompt_ids=list(input_ids), sampling_params=params
            )
        except ValueError as error:
            raise BackendError(f"verl refused the request: {error}") from error
        except Exception as error:  # a Ray actor, or the engine in it: any error of theirs
            raise InfraError(f"verl: {type(error).__name__}: {error}") from error
        if isinstance(answer, tuple):
            return answer
        ids, logprobs = list(answer.token_ids), getattr(answer, "log_probs", None)
        said = getattr(answer, "stop_reason", None)
        if said in ("abort", "aborted"):
            raise InfraError("verl aborted the request")
        reason = "length" if said == "length" or (said is None and most is not None and len(ids) >= most) else "stop"
        return answer_text(self.tokenizer, ids, reason), MetaInfo(
            output_tokens=ids, finish_reason=reason, logprobs=None if logprobs is None else list(logprobs)
        )


def rows_of(batch: Any) -> list[Row]:
    """Rows of a `DataProto`, or rows as they are."""
    columns = getattr(batch, "non_tensor_batch", None)
    if columns is None:
        return plain_rows(batch)
    return [{name: column[index] for name, column in columns.items()} for index in range(len(batch))]


BACKEND = Backend(make=VeRLBackend, rows_of=rows_of, output_of=published_output)
