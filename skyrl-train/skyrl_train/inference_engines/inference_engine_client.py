"""One engine out of many: routes requests and passes control to all. Knows engines only by their interface."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.base import (
    EngineInfo,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.types import ConversationType
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

_REMEMBERED_SESSIONS = 65_536


class InferenceEngineClient(InferenceEngineInterface):
    """Routes each request to an engine: a session always to the same one, anything new to the one with least to do.

    Args:
        engines: at least one.
        tokenizer: turns `prompts` (conversations) into tokens; requests in tokens do not need it.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        tokenizer: PreTrainedTokenizerBase,
        full_config: SkyRLConfig,
        restart: Callable[[int], Awaitable[InferenceEngineInterface]] | None = None,
    ):
        if not engines:
            raise ValueError("a client needs at least one engine")
        self.engines = list(engines)
        self.tokenizer = tokenizer
        self.lora_name: str | None = None
        self.give_weights: Callable[[int], Awaitable[None]] | None = None
        self.model_name = full_config.trainer.policy.model.path
        self._chat_template_kwargs = full_config.generator.chat_template_kwargs
        self._num_in_flight = [0] * len(self.engines)
        self._engine_of_session: dict[str | int, int] = {}

    async def infos(self) -> list[EngineInfo]:
        return await self._all("describe")

    async def describe(self) -> EngineInfo:
        return (await self.infos())[0]

    async def check_health(self) -> None:
        await self._all("check_health")

    async def settle(self) -> None:
        """Returns when no engine is starting."""

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        return {}

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        prompts = self._prompt_token_ids(input_batch)
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many session_ids; got {len(sessions)}")
        rows_of_engine: dict[int, list[int]] = {}
        for row, session in enumerate(sessions):
            engine = self._engine_of(session)
            self._num_in_flight[engine] += 1
            rows_of_engine.setdefault(engine, []).append(row)
        params = input_batch.get("sampling_params")
        outputs = await asyncio.gather(
            *(
                self._generate_on(
                    engine,
                    InferenceEngineInput(
                        prompt_token_ids=[prompts[row] for row in rows],
                        sampling_params=_params_of_rows(params, rows),
                        session_ids=[session for row in rows if (session := sessions[row]) is not None] or None,
                        lora_name=input_batch.get("lora_name") or self.lora_name,
                    ),
                    num_requests=len(rows),
                )
                for engine, rows in rows_of_engine.items()
            )
        )
        return _in_order(outputs, list(rows_of_engine.values()))

    async def _generate_on(
        self, engine: int, request: InferenceEngineInput, *, num_requests: int
    ) -> InferenceEngineOutput:
        try:
            return await self.engines[engine].generate(request)
        finally:
            self._num_in_flight[engine] -= num_requests

    def _prompt_token_ids(self, input_batch: InferenceEngineInput) -> list[list[int]]:
        conversations, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (token_ids is None):
            raise ValueError("a request needs either prompts or prompt_token_ids, and not both")
        if token_ids is not None:
            return token_ids
        assert conversations is not None
        return [self._templated(conversation) for conversation in conversations]

    def _templated(self, conversation: ConversationType) -> list[int]:
        encoded: Any = self.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, **self._chat_template_kwargs
        )
        return encoded["input_ids"]

    def _engine_of(self, session: str | int | None) -> int:
        if session in self._engine_of_session:
            return self._engine_of_session[session]
        engine = min(range(len(self.engines)), key=self._num_in_flight.__getitem__)
        if session is not None:
            if len(self._engine_of_session) >= _REMEMBERED_SESSIONS:
                del self._engine_of_session[next(iter(self._engine_of_session))]  # the oldest
            self._engine_of_session[session] = engine
        return engine

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in self.engines))

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        await self._all("pause_generation", mode)

    async def resume_generation(self) -> None:
        await self._all("resume_generation")

    async def abort_generation(self) -> None:
        await self._all("abort_generation")

    async def sleep(self, level: int = 1) -> None:
        await self._all("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._all("wake_up", tags)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._all("init_weight_update_communicator", init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._all("update_named_weights", request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        """Raises WeightSyncError if the engines do not hold the same weights."""
        return _common(await self._all("finish_weight_update", version))

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        return _common(await self._all("load_lora", request))

    async def unload_lora(self, name: str) -> None:
        await self._all("unload_lora", name)

    async def weight_version(self) -> int:
        """The oldest version among the engines."""
        return min(await self._all("weight_version"))

    async def reset_prefix_cache(self) -> None:
        await self._all("reset_prefix_cache")

    async def teardown(self) -> None:
        await self._all("teardown")


def _common(reports: Sequence[WeightReport]) -> WeightReport:
    """The report of all engines, if it is the same."""
    first, *others = reports
    for index, report in enumerate(others, start=1):
        names = set(first.fingerprints) | set(report.fingerprints)
        wrong = sorted(name for name in names if first.fingerprints.get(name) != report.fingerprints.get(name))
        if wrong:
            raise WeightSyncError(
                f"after version {first.version} engines 0 and {index} hold different weights: {', '.join(wrong[:5])}"
            )
    return first


def _params_of_rows(params: dict[str, Any] | None, rows: list[int]) -> dict[str, Any] | None:
    """Sampling params for some rows of a batch: a seed stays the seed of the row, whichever engine takes it."""
    if not params or not isinstance(params.get("seed"), int):
        return params
    return params | {"seed": [[params["seed"], row] for row in rows]}


def _in_order(outputs: Sequence[InferenceEngineOutput], rows_of_outputs: Sequence[list[int]]) -> InferenceEngineOutput:
    """The outputs of several engines in the order of the requests."""
    place = {row: (k, i) for k, rows in enumerate(rows_of_outputs) for i, row in enumerate(rows)}
    order = [place[row] for row in range(len(place))]
    with_log_probs = all(output["response_logprobs"] is not None for output in outputs)
    return InferenceEngineOutput(
        responses=[outputs[k]["responses"][i] for k, i in order],
        response_ids=[outputs[k]["response_ids"][i] for k, i in order],
        stop_reasons=[outputs[k]["stop_reasons"][i] for k, i in order],
        response_logprobs=[outputs[k]["response_logprobs"][i] for k, i in order] if with_log_probs else None,  # type: ignore[index]
        weight_versions=[outputs[k]["weight_versions"][i] for k, i in order],
    )
