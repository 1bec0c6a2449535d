"""Any server that speaks OpenAI's `/v1/completions`: vLLM, SGLang, `skyrl_train.entrypoints.serve`, ... For evaluation,
and for training if the server reports token ids and log-probs.
"""

import json
import os
from collections.abc import Mapping

from pydantic import Field

from skyrl_agent.errors import BackendError, ConfigError, InfraError
from skyrl_agent.integrations.base import (
    Backend,
    BackendSettings,
    compute_turn_seed,
    decode_response,
    plain_rows,
    published_output,
    read_settings,
)
from skyrl_agent.types import JsonObject, MetaInfo, Row, SamplingParams, Tokenizer
from skyrl_gym.services import PROBE_RETRIES, PROBE_SECONDS, AsyncService, Response, Retries

__all__ = ["BACKEND", "OpenAIBackend"]

RETRIES = Retries(attempts=4, first_wait=0.5, longest_wait=8.0, window=60.0)
_CANNOT_READ = (400, 404, 422)
"""Statuses of a server that does not know a field, or takes no token ids."""
_EXTENSIONS = {
    "logprobs": 0,
    "return_token_ids": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
"""Request fields beyond OpenAI's that vLLM and this project's own endpoint accept."""


class OpenAISettings(BackendSettings):
    """Settings in `generator.backend_config`."""

    model_name: str
    """Name of the model at the server."""
    api_url: str = "http://127.0.0.1:8000"
    """Address of the server, with or without `/v1`."""
    model_max_len: int | None = Field(default=None, ge=1)
    """Maximum number of tokens that the model reads and generates together. None: only the server's own limit applies,
    which it reports as an error."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; if unset, no key is sent."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout of one attempt of a request, in seconds."""


class OpenAIBackend:
    """Backend of an OpenAI-compatible server. Requests and replies have token ids and log-probs, as far as the server
    supports them, which the first request finds out.

    Args:
        infer_engine: not used.
        cfg: see `OpenAISettings`.
    """

    def __init__(self, infer_engine: object, tokenizer: Tokenizer, cfg: Mapping[str, object] | None = None) -> None:
        self.tokenizer = tokenizer
        self.settings = read_settings(OpenAISettings, cfg or {})
        self.url = self.settings.api_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        try:
            self._create_service()
        except ValueError as error:
            raise ConfigError(f"generator.backend_config.api_url={self.settings.api_url!r}: {error}") from None
        self._dialect: int | None = None

    async def probe(self) -> None:
        """Check that the server lists this model. Raises InfraError if it does not, or is unreachable."""
        where = f"generator.backend_config.api_url={self.settings.api_url}"
        url = self.url.removesuffix("/completions") + "/models"
        service = AsyncService(
            url, headers=self._build_headers(), timeout=PROBE_SECONDS, retries=PROBE_RETRIES, transient=frozenset()
        )
        try:
            response = await service.request(method="GET")
        except InfraError as error:
            raise InfraError(f"{where}: the model server is unreachable: {error}") from error
        finally:
            await service.close()
        if response.status in (401, 403):
            raise InfraError(
                f"{where}: HTTP {response.status}: the key in the environment variable "
                f"{self.settings.api_key_env} (generator.backend_config.api_key_env) is not accepted"
            )
        models = _parse_models(response)
        if models and self.settings.model_name not in models:
            raise InfraError(
                f"generator.backend_config.model_name={self.settings.model_name!r} is not served at "
                f"{self.settings.api_url}; it serves {', '.join(models)}"
            )

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        params = {name: value for name, value in sampling_params.items() if value is not None}
        if self.settings.model_max_len is not None:
            room = self.settings.model_max_len - len(input_ids)
            if room < 1:
                return "", MetaInfo(output_tokens=[], finish_reason="length", logprobs=[])
            params["max_tokens"] = min(params.get("max_tokens", room), room)
        if "seed" in params:
            params["seed"] = compute_turn_seed(params["seed"], input_ids)
        return self._read(await self._request_completion(input_ids, params, request_id))

    async def _request_completion(self, input_ids: list[int], params: JsonObject, request_id: str) -> JsonObject:
        """Return the only choice of the server's reply."""
        base = {"model": self.settings.model_name, **params}
        dialects = [
            lambda: base | _EXTENSIONS | {"prompt": input_ids, "session_id": request_id},
            lambda: base | {"prompt": input_ids},
            lambda: self._convert_to_text_request(base, input_ids),
        ]
        known, first = self._dialect, None
        for number, body in enumerate(dialects) if known is None else [(known, dialects[known])]:
            response = await self._send(body())
            if response.status == 200:
                self._dialect = number
                return _parse_choice(response)
            first = first or response
            if response.status not in _CANNOT_READ:
                break
        assert first is not None
        raise BackendError(f"{self.url} refused the request: HTTP {first.status}: {first.text.strip()[:500]}")

    def _convert_to_text_request(self, base: JsonObject, input_ids: list[int]) -> JsonObject:
        """Build a body for a server that reads no ids."""
        body = base | {"prompt": self.tokenizer.decode(input_ids, skip_special_tokens=False)}
        if ids := body.pop("stop_token_ids", None):
            stop = body.get("stop") or []
            ends = [self.tokenizer.decode([id], skip_special_tokens=False) for id in ids]
            body["stop"] = [*([stop] if isinstance(stop, str) else stop), *ends]
        return body

    async def _send(self, body: JsonObject) -> Response:
        service = self._create_service()
        try:
            return await service.request(body)
        finally:
            await service.close()

    def _create_service(self) -> AsyncService:
        """Create a client per request: generation outlasts connection setup, and clients are bound to an event loop."""
        return AsyncService(
            self.url, headers=self._build_headers(), timeout=self.settings.timeout_seconds, retries=RETRIES
        )

    def _build_headers(self) -> dict[str, str]:
        key = os.environ.get(self.settings.api_key_env)
        return {"Authorization": f"Bearer {key.strip()}"} if key else {}

    def _read(self, choice: Row) -> tuple[str, MetaInfo]:
        reason = {"length": "length", "abort": "abort"}.get(choice.get("finish_reason") or "stop", "stop")
        if reason == "abort":
            raise InfraError(f"{self.url} aborted the request")
        ids = choice.get("token_ids")
        if ids is None:
            return _parse_text(choice), MetaInfo(output_tokens=None, finish_reason=reason, logprobs=None)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        return decode_response(self.tokenizer, ids, reason), MetaInfo(
            output_tokens=list(ids),
            finish_reason=reason,
            logprobs=list(logprobs) if logprobs is not None and len(logprobs) == len(ids) else None,
            weight_versions=choice.get("weight_versions"),
        )


def _parse_models(response: Response) -> list[str]:
    """Return the models that a server lists; empty if it has no model list."""
    try:
        return [str(model["id"]) for model in json.loads(response.body)["data"]] if response.status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


def _parse_choice(response: Response) -> JsonObject:
    try:
        [choice] = json.loads(response.body)["choices"]
        return dict(choice)
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(f"the model's server sent no completion: {response.text.strip()[:300]}") from error


def _parse_text(choice: Row) -> str:
    """Return the text with the stop string, if the server reports the one it removed."""
    text, stop = choice.get("text") or "", choice.get("stop_reason")
    return text + stop if isinstance(stop, str) and not text.endswith(stop) else text


BACKEND = Backend(make=OpenAIBackend, rows_of=plain_rows, output_of=published_output)
