"""Weight sync from the policy to the engines: sequence of operations, and recovery from engine crashes.

    stage (files, deltas)  ->  pause generation  ->  send, compare fingerprints  ->  resume  ->  compare log-probs

The policy's log-probs are computed concurrently with the engines', or before the pause if the policy is offloaded from
their device.

`weight_sync` has the transports and `WeightSender`, which calls ranks and engines.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import (
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
    PauseMode,
)
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.colocation import Colocation
from skyrl_train.utils.io import expand_path
from skyrl_train.weight_sync.base import LoraLoadRequest
from skyrl_train.weight_sync.canary import CanaryTolerance, LogProbs, canary_prompts, check_canaries
from skyrl_train.weight_sync.fingerprint import differences
from skyrl_train.weight_sync.plan import RankLocation, Strategy, init_infos_for, plan_routes
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.workers.policy_worker import PolicyWorker

ADAPTER = "policy"
"""Name under which engines hold the policy's adapters."""


class WeightPublisher:
    """Sender of the policy's weights to all engines, with verification.

    Args:
        policy: the workers of the policy.
        client: the engines.
        colocation: moves engines and workers on the shared device; the engines' weights are awake during the send.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        policy: ActorGroup,
        client: InferenceEngineClient,
        colocation: Colocation,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self._cfg = cfg
        self._policy = policy
        self._client = client
        self._colocation = colocation
        self._vocabulary = len(tokenizer)
        self._adapters_alone = cfg.generator.weight_sync_strategy == "adapter"
        asynchronous = cfg.trainer.fully_async
        self._kv_after_sync = asynchronous.kv_after_sync
        # A request that continues from its tokens recomputes their KV cache.
        self._pause: PauseMode = "abort" if self._kv_after_sync == "recompute" else cfg.pause_at_sync
        self._connected = False
        self._sender: WeightSender | None = None
        self._version = 0
        self._num_published = 0
        self._infos: list[EngineInfo] = []
        self._compares = False
        self._expected: LogProbs | None = None
        """Log-probs of the policy, computed before it was offloaded; None: it stays on the device with the engines."""
        self.fingerprints: Mapping[str, int] = {}
        """Fingerprints of the tensors of the last sync; none without verification."""
        formats = (cfg.generator.model_dtype, "bfloat16" if cfg.trainer.bf16 else "float32")
        self._tolerance = CanaryTolerance(formats, cfg.generator.weight_sync_canary_tolerance)
        self._lock = asyncio.Lock()
        client.give_weights = self._send_to_restarted
        if client.restart is not None:
            client.restart = partial(self._restart, client.restart)
        if self._adapters_alone:
            client.lora_name = ADAPTER

    async def publish(self, version: int) -> dict[str, float]:
        """Sync the policy's weights to all engines as `version` and verify them. If an engine crashes meanwhile, it is
        restarted and the sync repeated, up to `generator.max_engine_restarts` times.

        Returns: metrics, including `seconds`.

        Raises:
            WeightSyncError: an engine has other weights than the policy.
            WorkerError: an engine exceeded its restarts, or a worker crashed.
        """
        start = time.monotonic()
        while True:
            try:
                async with self._lock:
                    self._version = version
                    metrics = await self._colocation.sync(self._send)
                    metrics |= await self._compare_log_probs()
                break
            except (WorkerError, WeightSyncError) as error:
                self._connected = False
                if not await self._try_recover():
                    raise  # no engine crashed: the error has another cause
                logger.warning(f"the weights of version {version} are sent again: {_first_line(error)}")
                await self._colocation.onload("policy")
        self._num_published += 1
        return metrics | {"seconds": time.monotonic() - start}

    async def _try_recover(self) -> bool:
        """Recover from engine crashes. Return True if an engine had crashed and runs again."""
        any_died = False

        async def wait_until_healthy() -> None:
            nonlocal any_died
            any_died = await self._client.wait_until_healthy()

        await self._colocation.recover(wait_until_healthy)
        return any_died

    async def _send(self) -> dict[str, float]:
        if not self._connected:
            await self._open_connections()
        written: dict[str, int] = {}
        if self._sender is None:
            written, *_ = await self._policy.call_all(PolicyWorker.write_adapters, self._version)
        elif self._sender.is_staged:
            await self._sender.stage(self._version)
        self._compares = self._is_canary_check_due()
        moves = not self._colocation.stays_beside_engines("policy")
        self._expected = await self._log_probs_of_policy() if self._compares and moves else None
        paused = time.monotonic()
        await self._client.pause_generation(self._pause)
        if self._sender is None:
            metrics, self.fingerprints = await self._load_adapters(written), written
        else:
            result = await self._sender.send(self._version)
            metrics, self.fingerprints = result.metrics, result.fingerprints
        if self._kv_after_sync != "keep":
            await self._client.reset_prefix_cache()
        await self._client.resume_generation()
        return metrics | {"pause_seconds": time.monotonic() - paused}

    async def _compare_log_probs(self) -> dict[str, float]:
        """Compare the log-probs of fixed tokens in syncs where the check is due. Raises WeightSyncError if they
        differ."""
        if not self._compares:
            return {}
        of_policy = self._log_probs_of_policy() if self._expected is None else _to_awaitable(self._expected)
        of_engines = (self._log_probs_of_engine(engine) for engine in self._client.engines)
        expected, *found = await asyncio.gather(of_policy, *of_engines)
        tolerance = self._tolerance.now(expected)
        gap = check_canaries(expected, found, tolerance, self._version)
        self._tolerance.update(gap, expected)
        return {"canary_gap": gap, "canary_tolerance": tolerance}

    # ---- connections

    async def _open_connections(self) -> None:
        self._infos = await self._client.infos()
        if not self._adapters_alone:
            places = await self._policy.call_all(PolicyWorker.place)
            strategy = self._cfg.generator.weight_sync_strategy
            self._sender = await self._connect(self._client.engines, self._infos, places, strategy)
        self._connected = True

    async def _connect(
        self,
        engines: Sequence[InferenceEngineInterface],
        infos: Sequence[EngineInfo],
        places: Sequence[RankLocation],
        strategy: Strategy,
    ) -> WeightSender:
        generator, placement = self._cfg.generator, self._cfg.trainer.placement
        (address, port), *_ = await self._policy.call_all(PolicyWorker.rendezvous_point)
        routes = plan_routes(
            strategy,
            infos,
            places,
            colocated=placement.colocate_all,
            device=placement.resolve_device(),
            remote=not generator.run_engines_locally,
            one_process=placement.launcher == "inline" and generator.run_engines_locally,
        )
        init_infos = init_infos_for(
            routes,
            infos,
            # NCCL does not support two processes on one GPU, and here they share GPUs.
            backend="gloo" if placement.colocate_all else generator.weight_sync_backend,
            master_address=address,
            master_port=port,
            directory=str(expand_path(generator.weight_sync_directory)),
            verification=generator.weight_sync_verification,
            timeout_seconds=generator.engine_control_timeout_seconds,
        )
        sender = WeightSender(self._policy, engines, init_infos)
        await sender.connect()
        return sender

    async def _restart(
        self, start: Callable[[int], Awaitable[InferenceEngineInterface]], index: int
    ) -> InferenceEngineInterface:
        """Restart engine `index` as soon as it may use the device."""

        async def start_and_wait() -> InferenceEngineInterface:
            engine = await start(index)
            await engine.describe()
            return engine

        return await self._colocation.start_engine(start_and_wait)

    async def _send_to_restarted(self, index: int) -> None:
        """Send the current version to the restarted engine `index`. If workers are on the device, the next sync sends
        it."""
        async with self._lock:
            self._connected = False  # the next sync connects to all of them again
            if not self._cfg.trainer.placement.colocate_all:
                await self._send_to(index)
                return
            await self._client.pause_generation("abort")
            await self._colocation.send_between(lambda: self._send_to(index))
            await self._client.resume_generation()

    async def _send_to(self, index: int) -> None:
        engine, infos = self._client.engines[index], await self._client.infos()
        if self._adapters_alone:
            await engine.load_lora(self._adapter())
            return
        places = await self._policy.call_all(PolicyWorker.place)
        strategy: Strategy = "checkpoint"
        if self._cfg.generator.run_engines_locally:
            # Not through GPU memory: between syncs it may belong to the engines.
            is_near = any(place.node == infos[index].node for place in places)
            strategy = "shared_memory" if is_near else "broadcast"
        sender = await self._connect([engine], [infos[index]], places, strategy)
        if sender.is_staged:
            await sender.stage(self._version)
        await sender.send(self._version)

    # ---- adapters alone

    def _adapter(self) -> LoraLoadRequest:
        folder = expand_path(self._cfg.generator.weight_sync_directory) / "adapters" / str(self._version)
        return LoraLoadRequest(name=ADAPTER, path=str(folder), version=self._version)

    async def _load_adapters(self, expected: dict[str, int]) -> dict[str, float]:
        """Load the files of `write_adapters` in every engine. Raises WeightSyncError if an engine loaded other
        weights."""
        reports = await asyncio.gather(*(engine.load_lora(self._adapter()) for engine in self._client.engines))
        for index, report in enumerate(reports):
            wrong = differences(expected, report.fingerprints)
            if wrong and self._cfg.generator.weight_sync_verification != "off":
                raise WeightSyncError(f"adapters of version {self._version} in engine {index}: {wrong}")
        return {"tensors": float(len(expected))}

    # ---- log-probs of a few tokens

    def _is_canary_check_due(self) -> bool:
        interval = self._cfg.generator.weight_sync_canary_interval
        return interval > 0 and self._num_published % interval == 0

    def _compute_canaries(self) -> list[list[int]]:
        shortest = min(info.max_model_len for info in self._infos)
        return canary_prompts(min([self._vocabulary, *(info.vocab_size for info in self._infos)]), shortest)

    async def _log_probs_of_policy(self) -> LogProbs:
        log_probs, *_ = await self._policy.call_all(PolicyWorker.log_probs_of_tokens, self._compute_canaries())
        return log_probs

    async def _log_probs_of_engine(self, engine: InferenceEngineInterface) -> LogProbs:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        completions = await gather_or_cancel(
            [
                engine.generate(
                    GenerationRequest(prompt_token_ids=prompt, sampling_params=params, lora_name=self._client.lora_name)
                )
                for prompt in self._compute_canaries()
            ]
        )
        return [completion.prompt_log_probs or [] for completion in completions]


async def _to_awaitable(log_probs: LogProbs) -> LogProbs:
    return log_probs


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
