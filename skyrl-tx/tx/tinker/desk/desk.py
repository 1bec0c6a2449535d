"""What can be asked of the server, without HTTP: each method is an endpoint's meaning.

Every method takes the tenant who asks; what belongs to another does not exist for him (404). Bad requests raise
`RequestError`, too many `Busy`. A method returns once what it says is durable.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tx.tinker.base_model import BaseModelFacts
from tx.tinker.config import EngineConfig
from tx.tinker.desk.caretaker import Caretaker
from tx.tinker.desk.checkpoints import Checkpoints
from tx.tinker.desk.dispatch import Dispatch
from tx.tinker.desk.engine_link import EngineLink, Patience
from tx.tinker.desk.futures import Futures
from tx.tinker.desk.limits import Limits
from tx.tinker.desk.live import Live
from tx.tinker.desk.orders import Orders
from tx.tinker.desk.recovery import recall
from tx.tinker.desk.reports import metrics, status
from tx.tinker.desk.results import StoredResult, TryAgain
from tx.tinker.desk.runs import Runs
from tx.tinker.desk.sampling import Sampling
from tx.tinker.desk.sessions import Sessions
from tx.tinker.desk.settling import Settling
from tx.tinker.desk.training import Training
from tx.tinker.engine.process import engine_command
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store
from tx.tinker.types import CheckpointKind
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import TrainingRequest

log = logging.getLogger(__name__)

Answer = dict[str, Any]
"""A JSON object as the endpoint sends it."""


class Desk:
    """
    Args:
        config: settings
        facts: of the base model
        store, blobs, folders: storage; the desk starts and closes the store
        command: address of the channel -> what to run as the engine; ours if None
        patience: with the engine
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: BaseModelFacts,
        store: Store,
        blobs: Blobs,
        folders: Folders,
        *,
        command: Callable[[str], list[str]] | None = None,
        patience: Patience | None = None,
    ):
        self._config, self._facts, self._store = config, facts, store
        self._live = live = Live()
        self._limits = limits = Limits(config.max_pending_per_tenant, config.max_sample_tokens_pending)
        self._link = link = EngineLink(
            command or partial(engine_command, config), config.state_folder / "sockets",
            patience or Patience(turn=config.pass_timeout_seconds), standby=config.standby_engine,
        )  # fmt: skip
        self._futures = Futures(store, blobs, live, lambda: link.trouble)
        self._dispatch = Dispatch(store, blobs, live, link, Settling(store, blobs, live, limits, self._futures))
        self._orders = Orders(store, blobs, live, limits, self._dispatch)
        self._sessions = Sessions(store, live, self._orders, self._dispatch)
        self._checkpoints = Checkpoints(store, live)
        self._runs = Runs(config, facts, store, live, limits, self._orders, self._dispatch, link, self._checkpoints)
        self._training = Training(facts, store, folders, live, self._orders, self._checkpoints)
        self._sampling = Sampling(facts, store, live, limits, self._dispatch, self._runs, self._checkpoints)
        self._caretaker = Caretaker(
            config, store, blobs, folders, live, self._futures, self._sessions, self._orders,
            config.state_folder / "snapshots",
        )  # fmt: skip
        self._started_at = time.time()

    async def start(self) -> None:
        """Reads what was there before, starts the engine in the background (requests queue until it is ready).

        Raises:
            ConfigError: the database cannot be used.
        """
        if self._config.checkpoints_base == EngineConfig.model_fields["checkpoints_base"].default:
            log.warning(
                "--checkpoints-base is %s: a restart of the machine may clear it; give a folder that stays",
                self._config.checkpoints_base,
            )
        await self._store.start()
        try:
            await self._caretaker.clean_up()
            await self._dispatch.recall(await recall(self._store, self._live, self._limits))
            await self._sessions.finish_endings()
        except BaseException:
            await self._store.close()
            raise
        self._link.start(self._dispatch.on_ready, self._dispatch.on_message, self._after_death)
        self._caretaker.start()

    async def close(self) -> None:
        """Ends the engine and what runs in the background. What was accepted and not done waits in the database."""
        await self._link.close()
        await self._dispatch.close()
        await self._caretaker.close()
        await self._store.close()

    async def _after_death(self, why: str) -> None:
        await self._dispatch.on_death(why)
        await self._caretaker.remove_unused_snapshots(frozenset(self._dispatch.recording))

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when the engine said that no new start will help (wrong settings): its log says why."""
        return self._link.hopeless

    # ---- sessions

    async def create_session(self, tenant: str, request: schemas.CreateSessionRequest) -> Answer:
        return await self._sessions.create(tenant, request)

    async def heartbeat(self, tenant: str, session_id: str) -> Answer:
        """Raises RequestError 404 for an unknown session, 410 for one that ended."""
        return await self._sessions.heartbeat(tenant, session_id)

    def keep_sessions(self, tenant: str) -> None:
        """Let none of the tenant's sessions expire yet: something was asked and refused, maybe a heartbeat, and of
        which session is not known."""
        self._sessions.keep(tenant)

    async def finish_session(self, tenant: str, session_id: str) -> Answer:
        return await self._sessions.finish(tenant, session_id)

    async def list_sessions(self, tenant: str, limit: int = 20, offset: int = 0) -> Answer:
        return await self._sessions.list(tenant, limit, offset)

    async def get_session(self, tenant: str, session_id: str) -> Answer:
        return await self._sessions.get(tenant, session_id)

    # ---- models: a request that takes time is answered {"request_id", "model_id"}

    async def create_model(self, tenant: str, request: schemas.CreateModelRequest) -> Answer:
        return await self._runs.create(tenant, request)

    async def get_info(self, tenant: str, model_id: str) -> Answer:
        return await self._runs.get_info(tenant, model_id)

    async def unload_model(self, tenant: str, model_id: str) -> Answer:
        return await self._runs.unload(tenant, model_id)

    # ---- training

    async def train(self, tenant: str, request: TrainingRequest, payload: bytes) -> Answer:
        """forward and forward_backward. `payload`: the canonical protobuf of `request`."""
        return await self._training.train(tenant, request, payload)

    async def refuse(self, tenant: str, model_id: str, seq: int, error: str) -> None:
        """Notes that a request was answered 4xx before it came here: its seq is used up. For http, when a body names a
        model and a seq and is wrong otherwise. Does nothing if there is no such model."""
        await self._orders.refuse(tenant, model_id, seq, error)

    async def optim_step(self, tenant: str, request: schemas.OptimStepRequest) -> Answer:
        return await self._training.optim_step(tenant, request)

    async def save_weights(self, tenant: str, request: schemas.SaveWeightsRequest) -> Answer:
        return await self._training.save_weights(tenant, request)

    async def save_weights_for_sampler(self, tenant: str, request: schemas.SaveWeightsForSamplerRequest) -> Answer:
        return await self._training.save_for_sampler(tenant, request)

    async def load_weights(self, tenant: str, request: schemas.LoadWeightsRequest) -> Answer:
        """Both forms: into a model (`model_id`, `seq_id`), or as a new one (`session_id`, `model_seq_id`)."""
        if request.creates_model:
            return await self._runs.create_from_checkpoint(tenant, request)
        return await self._training.load_in_place(tenant, request)

    # ---- sampling

    async def create_sampling_session(self, tenant: str, request: schemas.CreateSamplingSessionRequest) -> Answer:
        return await self._sampling.create_sampler(tenant, request)

    async def get_sampler(self, tenant: str, sampler_id: str) -> Answer:
        return await self._sampling.get_sampler(tenant, sampler_id)

    async def asample(self, tenant: str, request: schemas.AsampleRequest, idempotency_key: str | None = None) -> Answer:
        """`idempotency_key`: the same one is the same request, where no sampler and seq tell."""
        return await self._sampling.asample(tenant, request, idempotency_key)

    # ---- results

    async def retrieve(self, tenant: str, request_id: str, timeout: float = 30.0) -> StoredResult | TryAgain:
        """Waits up to `timeout` seconds for a result.

        Raises:
            RequestError: 404 unknown, 410 no longer kept
        """
        self._live.heard_of(tenant, request_id)
        return await self._futures.retrieve(tenant, request_id, timeout)

    # ---- checkpoints and runs

    async def weights_info(self, tenant: str, tinker_path: str) -> Answer:
        return await self._checkpoints.weights_info(tenant, tinker_path)

    async def training_runs(self, tenant: str, limit: int = 20, offset: int = 0) -> Answer:
        return await self._checkpoints.training_runs(tenant, limit, offset)

    async def training_run(self, tenant: str, run_id: str) -> Answer:
        return await self._checkpoints.training_run(tenant, run_id)

    async def run_checkpoints(self, tenant: str, run_id: str) -> Answer:
        return await self._checkpoints.of_run(tenant, run_id)

    async def checkpoints(self, tenant: str, limit: int = 100, offset: int = 0) -> Answer:
        return await self._checkpoints.of_tenant(tenant, limit, offset)

    async def checkpoint_archive(self, tenant: str, run_id: str, kind: CheckpointKind, name: str) -> str:
        """The folder (path or URL) whose files are to be packed with `folders.archive`."""
        return await self._checkpoints.archive(tenant, run_id, kind, name)

    async def delete_checkpoint(self, tenant: str, run_id: str, kind: CheckpointKind, name: str) -> None:
        await self._checkpoints.delete(tenant, run_id, kind, name)

    async def set_ttl(self, tenant: str, run_id: str, kind: CheckpointKind, name: str, ttl_seconds: int | None) -> None:
        await self._checkpoints.set_ttl(tenant, run_id, kind, name, ttl_seconds)

    async def publish(self, tenant: str, run_id: str, kind: CheckpointKind, name: str, public: bool) -> None:
        await self._checkpoints.publish(tenant, run_id, kind, name, public)

    # ---- about the server

    def capabilities(self) -> Answer:
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self._facts.max_context,
                    "trainable": True,
                    "sampleable": True,
                }
                for name in self._config.served_names
            ]
        }

    def metrics(self) -> dict[str, Any]:
        """Numbers of now, for /metrics: a number, or one for each tenant."""
        return metrics(self._live, self._limits, self._link, self._dispatch)

    def status(self) -> dict[str, Any]:
        """What a person wants to see, for /status."""
        return status(self._live, self._link, self._dispatch, time.time() - self._started_at)
