"""Sampling commands on the engine's event loop: each is a task, and the backend batches them."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from skyrl_gym.waits import waiting
from tx.errors import ModelError
from tx.tinker.backends.base import BackendLost, SamplingBackend
from tx.tinker.commands import Sample
from tx.tinker.engine.messages import Done, Failed, FromEngine
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import DamagedFilesError, Signature, compute_signature
from tx.tinker.wire.codec import encode_sample_output

WATCH_SECONDS = 1.0
MOST_VERIFIED = 4096
"""Adapters remembered as verified."""


class Sampling:
    """
    Args:
        backend: started
        folders: where adapters stand
        send: reports to the API process
    """

    def __init__(self, backend: SamplingBackend, folders: Folders, send: Callable[[FromEngine], None]):
        self.tokens: Counter[str] = Counter()
        """Written, by tenant."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when nothing can be sampled here any more; what was asked for is left unanswered."""
        self._step_began: float | None = None
        self._backend, self._folders, self._send = backend, folders, send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._verified: OrderedDict[str, Signature] = OrderedDict()
        """Adapters whose files were compared with their checksums, as they were then."""

    def begin(self, command: Sample) -> None:
        """Start a sample request."""
        task = asyncio.create_task(self._process_request(command))
        self._tasks[command.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(command.request_id, None))

    def cancel(self, request_ids: list[str]) -> None:
        """Cancel unfinished requests without reporting results."""
        for request_id in request_ids:
            if task := self._tasks.get(request_id):
                task.cancel()

    async def watch(self) -> None:
        """Keep `step_seconds` up to date; ends with the backend, by BackendLost."""
        while True:
            self._step_began = time.monotonic()
            with waiting("a sampling step"):
                await self._backend.end_of_step()
            self._step_began = None
            await asyncio.sleep(WATCH_SECONDS)

    def step_seconds(self) -> float:
        """Return the approximate duration of the backend's present step; 0 between two steps."""
        return 0.0 if self._step_began is None else time.monotonic() - self._step_began

    async def close(self) -> None:
        """Cancel all requests and close the backend."""
        for task in self._tasks.values():
            task.cancel()
        await self._backend.close()

    async def _process_request(self, command: Sample) -> None:
        try:
            adapter = await self._get_local_folder(command.adapter)
            output = await self._backend.sample(command.spec, adapter, tenant=command.tenant)
            result = encode_sample_output(output)
        except FileNotFoundError:
            gone = ModelError("the weights of this sampler no longer exist")
            self._send(Failed.of(command.request_id, gone))
        except DamagedFilesError as error:
            logger.error("adapter {}: {}", command.adapter, error)
            damaged = ModelError(
                f"the weights of this sampler are damaged on the server's disk: {error}. Save them again"
            )
            self._send(Failed.of(command.request_id, damaged))
        except BackendLost as error:
            if not self.lost.done():
                self.lost.set_exception(error)
        except Exception as error:  # reported as this request's failure
            self._send(Failed.of(command.request_id, error))
        else:
            tokens = sum(len(sequence.tokens) for sequence in output.sequences)
            self.tokens[command.tenant] += tokens
            self._send(Done(request_id=command.request_id, result=result, metrics={"tokens": float(tokens)}))

    async def _get_local_folder(self, adapter: str | None) -> Path | None:
        """Return the folder of an adapter. Its files are read and compared with their checksums when this process has
        not done so, or they were written since."""
        if adapter is None:
            return None
        known = self._verified.get(adapter)
        if known is not None and "://" not in adapter and compute_signature(self._folders.local(adapter)) == known:
            self._verified.move_to_end(adapter)
            return self._folders.local(adapter)
        if known is not None and "://" in adapter:
            return await asyncio.to_thread(self._folders.local, adapter)
        local = await asyncio.to_thread(self._folders.verified, adapter)
        self._verified[adapter] = compute_signature(local)
        if len(self._verified) > MOST_VERIFIED:
            self._verified.popitem(last=False)
        return local
