"""Composition of the server without HTTP: its parts, their start and their end.

Methods of the public parts take the asking tenant; things of other tenants do not exist for them (404). Bad requests
raise `RequestError`, too many raise `Busy`. A method returns once its effect is durable.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from pydantic import JsonValue

from tx.tinker.base_model import BaseModelFacts
from tx.tinker.commands import EncodeContext
from tx.tinker.config import EngineConfig
from tx.tinker.engine.process import build_engine_command
from tx.tinker.service.checkpoints import Checkpoints
from tx.tinker.service.cleanup import BackgroundCleanup
from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.engine_link import EngineLink, EngineTimeouts
from tx.tinker.service.futures import Futures
from tx.tinker.service.intake import RequestIntake
from tx.tinker.service.kept_samples import KeptSamples
from tx.tinker.service.limits import Limits
from tx.tinker.service.quotas import TokenQuota
from tx.tinker.service.recorder import ResultRecorder
from tx.tinker.service.recovery import restore
from tx.tinker.service.reports import Metrics, collect_metrics
from tx.tinker.service.run_files import RunFiles
from tx.tinker.service.runs import Runs
from tx.tinker.service.sampling import Samplers
from tx.tinker.service.sessions import Sessions
from tx.tinker.service.state import ServerState
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store
from tx.tinker.texts import Texts
from tx.tinker.wire.losses import STABLE_REINFORCE

log = logging.getLogger(__name__)

LAST_LINES_SECONDS = 5.0
"""Time for the last lines of curves when the server stops: if the disk is stalled, curves have a gap."""
METRICS_SECONDS = 60.0
"""Time between two lines of the server's own curves."""
RUN_FOLDERS_SECONDS = 600.0
"""Time between two looks at the total size of run folders."""


class TinkerService:
    """Parts of the server.

    Attributes:
        sessions, models, intake, sampling, checkpoints, futures: operations of the endpoints
        link, dispatch, state, limits, cleanup, store: engine, its commands, live sessions and models, quotas, storage

    Args:
        config: settings
        facts: of the base model
        store, blobs, folders: storage; the service starts and closes the store
        command: address of the channel -> what to run as the engine; ours if None
        timeouts: of the engine; defaults if None
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
        timeouts: EngineTimeouts | None = None,
    ):
        self.config, self._facts, self.store = config, facts, store
        self.state = state = ServerState()
        self.limits = limits = Limits(
            config.max_pending_per_tenant,
            config.max_sample_tokens_pending,
            TokenQuota(config.max_tokens_per_minute_per_tenant),
        )
        self.link = link = EngineLink(
            command or partial(build_engine_command, config), config.state_folder / "sockets",
            timeouts or EngineTimeouts(turn=config.pass_timeout_seconds), standby=config.standby_engine,
        )  # fmt: skip
        self.futures = Futures(store, blobs, state, lambda: link.trouble)
        texts, most = Texts(facts.folder), config.keep_samples
        samples = KeptSamples(most, config.keep_samples_mb * 10**6, texts) if most else None
        self._run_files = RunFiles(config.state_folder / "runs", samples)
        private = (folders.base, str(config.state_folder.absolute()))
        recorder = ResultRecorder(store, blobs, state, limits, self.futures, self._run_files, private)
        self.dispatch = Dispatch(store, blobs, state, link, recorder)
        self.checkpoints = Checkpoints(store, state, config.max_checkpoints_gb_per_tenant)
        context = EncodeContext(facts, folders, self.checkpoints)
        self.intake = RequestIntake(store, blobs, state, limits, self.dispatch, context)
        self.sessions = Sessions(store, state, self.intake, self.dispatch)
        self.models = Runs(config, facts, store, state, limits, self.intake, self.dispatch, link, self.checkpoints)
        self.sampling = Samplers(
            facts, store, state, limits, self.dispatch, self.models, self.checkpoints,
            records_stability=config.stable_reinforce_as is not None, scores_targets=config.backend == "torch",
        )  # fmt: skip
        self.cleanup = BackgroundCleanup(
            config, store, blobs, folders, state, self.futures, self.sessions, self.intake,
            config.state_folder / "snapshots",
        )  # fmt: skip

    async def start(self) -> None:
        """Restore the state from the database and start the engine in the background; requests queue until it is ready.

        Raises:
            ConfigError: the database cannot be used.
        """
        if self.config.checkpoints_base == EngineConfig.model_fields["checkpoints_base"].default:
            log.warning(
                "--checkpoints-base is %s: it may be cleared when the machine restarts; use a persistent folder",
                self.config.checkpoints_base,
            )
        if (loss := self.config.stable_reinforce_as) is not None:
            log.warning("the loss %s is computed as %s (--stable-reinforce-as)", STABLE_REINFORCE, loss)
        await self.store.start()
        try:
            # Before requests are taken in: a blob without a row is then a leftover, not one that is being written.
            await self.cleanup.run_startup_cleanup()
            await self.dispatch.restore(await restore(self.store, self.state, self.limits))
            await self.sessions.finish_endings()
        except BaseException:
            await self.store.close()
            raise
        # After the restore: the engine is sent what that has found as soon as it is ready.
        self.link.start(self.dispatch.on_ready, self.dispatch.on_message, self._handle_engine_exit)
        await self.cleanup.measure_disks()
        self.cleanup.start()
        self._run_files.begin(self.config)
        await self._log_metrics()
        self.cleanup.every(METRICS_SECONDS, self._log_metrics)
        await self._remove_old_run_folders()
        self.cleanup.every(RUN_FOLDERS_SECONDS, self._remove_old_run_folders)

    async def close(self) -> None:
        """Stop the engine and all background tasks. Accepted, unfinished requests stay in the database."""
        # The engine first: what it finishes while it stops is still recorded. The store last: all others write to it.
        await self.link.close()
        await self.dispatch.close()
        await self.cleanup.close()
        await asyncio.to_thread(self._run_files.close, LAST_LINES_SECONDS)
        await self.store.close()

    async def _log_metrics(self) -> None:
        self._run_files.note(self.metrics())

    async def _remove_old_run_folders(self) -> None:
        self._run_files.limit(self.config.max_runs_gb * 1e9, self.state.runs)

    async def _handle_engine_exit(self, why: str) -> None:
        await self.dispatch.on_crash(why)
        # The next engine starts after this, so no snapshot is being written; some may still be recorded.
        await self.cleanup.remove_unused_snapshots(frozenset(self.dispatch.recording))

    @property
    def fatal_config_error(self) -> asyncio.Event:
        """Set when the engine exits because of wrong settings, which a restart cannot help; its log has the reason."""
        return self.link.fatal_config_error

    def capabilities(self) -> dict[str, JsonValue]:
        """List the served models."""
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self._facts.max_context,
                    "trainable": True,
                    "sampleable": True,
                }
                for name in self.config.served_names
            ]
        }

    def metrics(self) -> Metrics:
        """Return the present values of /metrics."""
        return collect_metrics(self.state, self.limits, self.link, self.dispatch)
