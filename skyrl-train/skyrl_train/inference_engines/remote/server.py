"""Rollout engine backed by an external server. `ServerProtocol` covers the differences between kinds of servers.

While the engine is paused, requests wait on the client side, so that each is sent with the weight version that will
start its completion: the version is part of its prefix-cache key. If the weights change in transit (another process may
update them), the request is sent again.

An adapter is loaded under its name and version (`policy@3`): running requests keep the version that they started with,
and every process can find the newest version at the server.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import httpx
from loguru import logger
from pydantic import SecretStr
from transformers import PreTrainedTokenizerBase

from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.errors import ConfigError, UnsupportedByEngine
from skyrl_train.inference_engines.base import (
    WAKE_TAGS,
    Completion,
    EngineInfo,
    Feature,
    GenerationRequest,
    InferenceEngineInterface,
    PauseMode,
    check_pause_mode,
    check_sleep_level,
    tags_to_wake,
)
from skyrl_train.inference_engines.gate import Gate
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair, select_requested
from skyrl_train.inference_engines.remote.connection import ServerConnection, ServerRefused, run_to_end
from skyrl_train.inference_engines.remote.key_guard import is_loopback
from skyrl_train.inference_engines.remote.protocol import ServerFacts, ServerProtocol
from skyrl_train.inference_engines.remote.running_requests import RunningRequests
from skyrl_train.inference_engines.vllm.sampling import check_and_split_seed
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

T = TypeVar("T")

_LATE_SECONDS, _LATE_TRIES = 0.5, 20


class RemoteInferenceEngine(InferenceEngineInterface):
    """Rollout engine on one server.

    Args:
        url: `host:port` or a URL
        model_name: model of the trainer
        backend: kind of server; None: detect it
        tokenizer: decodes completions; None: for weight updates only
        request_timeout_seconds: deadline of one request
        control_timeout_seconds: deadline of other calls
        api_key: the server's key, if it has one
        protocol: builds the protocol from a connection and the request deadline; None: by the kind of server

    Raises:
        ConfigError: not a server of this kind.
        WorkerError: unreachable, or no response.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        *,
        backend: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        request_timeout_seconds: float = 3600.0,
        control_timeout_seconds: float = 600.0,
        api_key: SecretStr | None = None,
        protocol: Callable[[ServerConnection, float], ServerProtocol] | None = None,
    ):
        self._server = ServerConnection(url, control_timeout_seconds, api_key=api_key)
        self.api_key = api_key
        self.url = self._server.url
        self.model_name = model_name
        self.request_timeout_seconds = request_timeout_seconds
        self.control_timeout_seconds = control_timeout_seconds
        self._tokenizer = tokenizer
        self._gate = Gate()
        self._running = RunningRequests()
        self._asleep: set[str] = set()
        self._num_answers = 0
        self._paused_for_update = False
        self._update_is_open = False
        self._adapters: dict[str, int] = {}
        self._facts, self._version = run_to_end(self._connect(backend, protocol, request_timeout_seconds))

    async def _connect(
        self,
        backend: str | None,
        protocol: Callable[[ServerConnection, float], ServerProtocol] | None,
        request_timeout_seconds: float,
    ) -> tuple[ServerFacts, int]:
        try:
            if protocol is None:
                protocol = _list_server_protocols()[backend or await get_server_kind(self._server)]
            self._protocol = protocol(self._server, request_timeout_seconds)
            try:
                facts = await self._protocol.get_facts(), await self._protocol.get_weight_version()
                await self._log_if_unprotected()
                return facts
            except (ServerRefused, KeyError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"generator.remote_inference_engine_urls: the server at {self.url} does not respond like a "
                    f"{backend or 'rollout'} engine ({type(error).__name__}: {error})"
                ) from error
        finally:
            await self._server.close()

    async def _log_if_unprotected(self) -> None:
        """Log a warning if others than this run may control the server."""
        if self.api_key is None:
            is_open = not is_loopback(httpx.URL(self.url).host)
        else:
            is_open = not await self._server.check_key_required("/server_info")
        if is_open:
            logger.warning(
                f"the server at {self.url} does not require a key on its control routes, so anyone who can reach it "
                "can call any method of its workers. Start it as described in docs/engines.md (serve_vllm "
                "--api-key-file, sglang --api-key)"
            )

    @property
    def backend(self) -> str:
        """The registered name of this kind of server."""
        return self._facts.info.backend

    @property
    def protocol(self) -> ServerProtocol:
        """The routes of this kind of server."""
        return self._protocol

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the served model."""
        return self._facts.names

    async def describe(self) -> EngineInfo:
        return self._facts.info

    async def check_health(self) -> None:
        await self._protocol.check_health()

    def progress(self) -> int:
        """Return the number of responses so far, the only progress visible to the client."""
        return self._num_answers

    async def tokenize(self, text: str) -> list[int]:
        """Return the server's token ids of a text, without added special tokens."""
        return await self._protocol.tokenize(text)

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        prompt, adapter = request.prompt_token_ids, request.lora_name
        params, seed = check_and_split_seed(request.sampling_params)
        self._check_request(prompt, params, seed)
        if adapter is not None:
            why = self._facts.info.unsupported.get("lora")
            if why is not None:
                raise ValueError(f"no adapter {adapter!r} is loaded at {self.url}: {why}")
            await self._get_adapter_version(adapter)
        return select_requested(await self._wait_for_answer(prompt, params, seed, adapter), params, self._decode)

    async def _wait_for_answer(
        self, prompt: list[int], params: EngineSamplingParams, seed: SeedPair | None, adapter: str | None
    ) -> Completion:
        while True:
            if not await self._gate.wait():
                return Completion(token_ids=[], log_probs=[], stop_reason="abort", weight_versions=[])
            version = self._version
            adapter_version = 0 if adapter is None else await self._get_adapter_version(adapter)
            name = None if adapter is None else _get_server_adapter_name(adapter, adapter_version)
            try:
                with self._running.count_request(adapter):
                    answer = await self._protocol.complete(prompt, params, seed, name, _cache_key(version, name))
            except ServerRefused as error:
                if name is not None and error.status == 404:  # another process has loaded a newer one
                    self._adapters.pop(str(adapter), None)
                    if await self._get_adapter_version(str(adapter)) != adapter_version:
                        continue
                raise ValueError(f"the server at {self.url} refused a request: {error.said}") from None
            self._num_answers += 1
            if answer.weight_versions and answer.weight_versions[-1] != self._version:
                self._version = answer.weight_versions[-1]
            begun_by = answer.weight_versions[0] if answer.weight_versions else version
            if begun_by != version and self._facts.prefix_caching:
                continue  # its prefix may have been computed by earlier weights
            if adapter is not None:
                return replace(answer, weight_versions=[adapter_version] * len(answer.token_ids))
            return answer

    def _check_request(self, prompt: list[int], params: EngineSamplingParams, seed: SeedPair | None) -> None:
        info = self._facts.info
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        if len(prompt) >= info.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for a completion in the context of "
                f"{info.max_model_len} at {self.url}"
            )
        _check_ids("a prompt's token ids", prompt, info.vocab_size)
        _check_ids("sampling parameter stop_token_ids", params.stop_token_ids, info.vocab_size)
        if seed is not None:
            self._check_supported("seed")
        if params.prompt_logprobs is not None:
            self._check_supported("prompt_top_log_probs" if params.prompt_logprobs else "prompt_log_probs")
        if params.stop:
            self._check_supported("stop_strings")
        if self._asleep:
            raise RuntimeError(
                f"the server at {self.url} is asleep ({', '.join(sorted(self._asleep))}); wake it up first"
            )

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            raise ValueError("this remote engine was created without a tokenizer, for weight sync only")
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    # ---- pauses

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        check_pause_mode(mode)
        self._gate.close("paused")
        if mode == "abort":
            self._gate.dismiss()
            if not self._protocol.aborts_while_paused and await self._protocol.is_paused():
                await self.abort_generation()
                return
        if mode == "wait":
            await self._running.wait_until_idle(of_any=True)
        await self._protocol.pause(mode)
        if mode == "abort":
            await self._abort_late_requests()

    async def _abort_late_requests(self) -> None:
        """Abort requests that were in transit during the pause and reached the server after it."""
        for _ in range(_LATE_TRIES):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LATE_SECONDS):
                    return await self._running.wait_until_idle(of_any=True)
            await self.abort_generation()
        logger.warning(
            f"the server at {self.url} did not finish {len(self._running)} requests within "
            f"{_LATE_TRIES * _LATE_SECONDS:g} s of pause_generation('abort'); they wait for the resume"
        )

    async def resume_generation(self) -> None:
        if self._update_is_open:
            self._paused_for_update = True  # weights are mixed: the end of the update resumes
            return
        await self._protocol.resume()
        self._version = await self._protocol.get_weight_version()
        self._gate.open("paused")

    async def abort_generation(self) -> None:
        self._gate.dismiss()
        await self._protocol.abort()
        if self._protocol.aborts_while_paused or not len(self._running) or self._update_is_open:
            return
        if await self._protocol.is_paused():
            await self._protocol.resume()
            await self._running.wait_until_idle(of_any=True)
            await self._protocol.pause("keep")

    async def sleep(self, level: int = 1) -> None:
        check_sleep_level(level)
        self._check_supported("sleep")
        if len(self._running):
            raise RuntimeError(
                f"the server at {self.url} cannot sleep while {len(self._running)} requests run; "
                "pause with mode 'wait' or 'abort' first"
            )
        await self._protocol.sleep(level)
        self._asleep = set(WAKE_TAGS)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        wanted = tags_to_wake(tags)
        if to_wake := [tag for tag in wanted if tag in self._asleep]:
            await self._protocol.wake_up(to_wake)
            self._asleep -= set(to_wake)

    # ---- weights

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        self._check_supported("weight_update")
        if init_info.transport == "broadcast":
            self._check_supported("broadcast")
        await self._protocol.init_weight_transfer(init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        if not self._paused_for_update and not await self._protocol.is_paused():
            self._gate.close("paused")
            await self._protocol.pause("keep")
            self._paused_for_update = True
        self._update_is_open = True
        await self._protocol.update_weights(request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        report = await self._protocol.apply_weights(version)
        self._version, self._update_is_open = version, False
        await self._protocol.reset_prefix_cache()
        if self._paused_for_update:
            self._paused_for_update = False
            await self.resume_generation()
        return report

    async def weight_version(self) -> int:
        self._version = await self._protocol.get_weight_version()
        return self._version

    async def reset_prefix_cache(self) -> None:
        await self._protocol.reset_prefix_cache()

    # ---- adapters

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        self._check_supported("lora")
        name = _get_server_adapter_name(request.name, request.version)
        before = await self._get_server_versions(request.name)
        if request.version in before:
            await self._protocol.unload_adapter(name)
        fingerprints = await self._protocol.load_adapter(name, request.path, request.version)
        self._adapters[request.name] = request.version
        for version in before:
            if version != request.version:
                await self._protocol.unload_adapter(_get_server_adapter_name(request.name, version))
        return WeightReport(version=request.version, fingerprints=fingerprints)

    async def unload_lora(self, name: str) -> None:
        self._check_supported("lora")
        version = await self._get_adapter_version(name)
        await self._running.wait_until_idle(name)
        await self._protocol.unload_adapter(_get_server_adapter_name(name, version))
        self._adapters.pop(name, None)

    async def _get_adapter_version(self, name: str) -> int:
        if name not in self._adapters:
            versions = await self._get_server_versions(name)
            if not versions:
                raise ValueError(f"no adapter {name!r} is loaded at {self.url}")
            self._adapters[name] = max(versions)
        return self._adapters[name]

    async def _get_server_versions(self, name: str) -> list[int]:
        loaded = [entry.rpartition("@") for entry in await self._protocol.list_adapters()]
        return [int(version) for base, _, version in loaded if base == name and version.isdigit()]

    async def teardown(self) -> None:
        """Release the server without stopping it; requests in flight end with an error."""
        self._gate.dismiss()
        await self._server.shut()

    async def disconnect(self) -> None:
        """Close the state bound to this event loop, so that another loop can use the engine."""
        await self._server.close()

    def _check_supported(self, feature: Feature) -> None:
        why = self._facts.info.unsupported.get(feature)
        if why is not None:
            raise UnsupportedByEngine(f"{feature}: {why}")


async def get_server_kind(server: ServerConnection) -> str:
    """Detect the kind of a server. Returns its registered name.

    Raises:
        ConfigError: not a registered kind.
        WorkerError: unreachable.
    """
    said: dict[str, object] = {}
    for path in ("/version", "/model_info"):
        try:
            answer = await server.get(path)
        except ServerRefused:
            continue
        if isinstance(answer, dict):
            said |= answer
    for name, protocol in _list_server_protocols().items():
        if protocol.is_served_by(said):
            return name
    raise ConfigError(
        f"generator.remote_inference_engine_urls: {server.url} responds, but is neither a vLLM nor an SGLang server "
        "(no /version, no /model_info); check the port"
    )


def _list_server_protocols() -> dict[str, type[ServerProtocol]]:
    """Return the protocols of all engine kinds that support external servers."""
    return {
        name: registration.requires.server_protocol()
        for name, registration in EngineRegistry.list_registrations().items()
        if registration.requires.server_protocol is not None
    }


def _get_server_adapter_name(adapter: str, version: int) -> str:
    return f"{adapter}@{version}"


def _cache_key(version: int, adapter: str | None) -> str:
    """Return a key of only letters and digits, since vLLM accepts few other characters."""
    return hashlib.sha256(f"{version} {adapter or ''}".encode()).hexdigest()[:32]


def _check_ids(what: str, ids: Sequence[int], vocabulary: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise ValueError(f"{what} must be in the vocabulary, 0 to {vocabulary - 1}; got {wrong}")
