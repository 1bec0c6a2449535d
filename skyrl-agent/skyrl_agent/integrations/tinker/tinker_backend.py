"""A sampling client of the `tinker` SDK as the model."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any

import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

from skyrl_agent.errors import BackendError, InfraError
from skyrl_agent.integrations.base import (
    Backend,
    BackendSettings,
    compute_turn_seed,
    decode_response,
    plain_rows,
    published_output,
    read_settings,
)
from skyrl_agent.types import MetaInfo, SamplingParams, Tokenizer
from skyrl_gym.chat.template import turn_ends_of

__all__ = ["BACKEND", "TinkerBackend", "settled"]

_TRANSIENT_STATUSES = (408, 409, 429)


class TinkerBackend:
    """
    Args:
        infer_engine: a sampling client; may be exchanged for a newer one (`client`) between batches.
    """

    def __init__(self, infer_engine: Any, tokenizer: Tokenizer, cfg: Mapping[str, object] | None = None) -> None:
        read_settings(BackendSettings, cfg or {})
        self.client, self.tokenizer = infer_engine, tokenizer

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        params = {name: value for name, value in sampling_params.items() if value is not None and name != "logprobs"}
        if "seed" in params:
            params["seed"] = compute_turn_seed(params["seed"], input_ids)
        if (stop_ids := params.pop("stop_token_ids", None)) and not params.get("stop"):
            params["stop"] = sorted({*stop_ids} | turn_ends_of(self.tokenizer).ids)
        unknown = sorted(set(params) - set(types.SamplingParams.model_fields))
        if unknown:
            raise BackendError(f"generator.sampling_params has {', '.join(unknown)}, which tinker does not support")
        try:
            answer = await settled(
                self.client.sample(types.ModelInput.from_ints(list(input_ids)), 1, types.SamplingParams(**params))
            )
        except tinker.APIStatusError as error:
            is_transient = error.status_code >= 500 or error.status_code in _TRANSIENT_STATUSES
            raise (InfraError if is_transient else BackendError)(f"the tinker server: {error}") from error
        except tinker.RequestFailedError as error:
            is_ours = str(getattr(error, "category", "")).lower() == "user"
            raise (BackendError if is_ours else InfraError)(f"the tinker server: {error}") from error
        except (tinker.TinkerError, ConnectionError, TimeoutError, FutureCancelled) as error:
            raise InfraError(f"the tinker server: {type(error).__name__}: {error}") from error
        [sequence] = answer.sequences
        ids, reason = list(sequence.tokens), str(sequence.stop_reason)
        logprobs = None if sequence.logprobs is None else list(sequence.logprobs)
        return decode_response(self.tokenizer, ids, reason), MetaInfo(
            output_tokens=ids, finish_reason=reason, logprobs=logprobs
        )


async def settled(promised: Any) -> Any:
    """Await a future of the SDK. Other values are returned unchanged (earlier releases returned clients)."""
    if hasattr(promised, "result_async"):
        return await promised.result_async()
    if hasattr(promised, "add_done_callback"):
        return await asyncio.wrap_future(promised)
    return promised


BACKEND = Backend(make=TinkerBackend, rows_of=plain_rows, output_of=published_output)
