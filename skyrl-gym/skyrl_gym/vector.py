"""Many environments at once, in threads or in processes. What one of them raises is a value in its place.

    with make_vec("gsm8k", rows, mode="thread") as envs:
        conversations = envs.init()
        outputs = envs.step([ask(model, conversation) for conversation in conversations])

A script that uses processes needs `if __name__ == "__main__":` around its own code: they are spawned, never forked.
"""

import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, Self

from skyrl_gym.deadline import DeadlineExceeded, call_before_deadline
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import EnvSpec, make, spec
from skyrl_gym.episode import Episode

START_SECONDS = 60.0
"""How long a process may take to start: it imports this package, and the environment's module."""


NO_MAIN_GUARD = (
    'mode="process" starts Python processes that import the main script again: put the code of a script that calls '
    'make_vec under `if __name__ == "__main__":`, or use mode="thread"'
)


@dataclass(frozen=True)
class Failed:
    """Stands where a result would be: what was raised instead."""

    error: Exception
    traceback: str = ""
    """As text: of the process or thread in which it happened."""


@dataclass
class _Slot:
    """One environment's place."""

    worker: int
    failure: Failed | None = None
    is_running: bool = False


class VecEnv:
    """A fixed number of slots, each with a task of its own. Made by `make_vec`.

    - `init` starts an episode in every slot, also in those that failed before.
    - `step` steps the slots whose episode runs. A slot that is done gives None, whatever its action. A slot that failed
      gives its `Failed` again. An action of None leaves its slot as it is and gives None.
    - A call that exceeds its deadline fails its slot. Its worker is given up (a process is killed, a thread left
      behind), and the other slots of the same worker fail with it; there are none unless `num_workers` is less than the
      number of slots.

    Results stand in the order of the tasks.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        tasks: Sequence[tuple[ConversationType | None, dict[str, Any]]],
        workers: Sequence["_ThreadWorker | _ProcessWorker"],
        timeout_seconds: float,
        env_config: Any,
    ) -> None:
        self.env_spec = env_spec
        self.tasks = list(tasks)
        self.timeout_seconds = timeout_seconds
        self.env_config = env_config
        self._workers = list(workers)
        self._slots = [_Slot(worker=index % len(workers)) for index in range(len(tasks))]
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(len(workers), thread_name_prefix="skyrl-gym-vec")

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def done(self) -> list[bool]:
        """Slots in which no episode runs: it is over, it failed, or none has begun."""
        return [not slot.is_running for slot in self._slots]

    def init(
        self, prompts: Sequence[ConversationType] | None = None, seeds: Sequence[int | None] | None = None
    ) -> list[ConversationType | Failed]:
        """Makes every slot's environment and starts its episode.

        Args:
            prompts: one for each slot; the `prompt` column of the rows if not given.
            seeds: one for each slot, for environments that take one.

        Raises:
            ValueError: not one prompt or seed for each slot, or a slot without a prompt.
        """
        prompts = self._each("prompts", prompts) if prompts is not None else self._own_prompts()
        seeds = self._each("seeds", seeds) if seeds is not None else [None] * len(self)
        for worker in self._workers:
            worker.revive()
        for slot in self._slots:
            slot.failure, slot.is_running = None, True

        def start(index: int, worker: Any) -> ConversationType:
            extras = copy.deepcopy(self.tasks[index][1])
            arguments = (self.env_spec, self.env_config, extras, copy.deepcopy(prompts[index]), seeds[index])
            return worker.call(index, "start", arguments, self.timeout_seconds)

        return self._in_every_slot(start, range(len(self)))

    def step(self, actions: Sequence[str | None]) -> list[BaseTextEnvStepOutput | Failed | None]:
        """One turn of every slot whose episode runs. Raises ValueError if there is not one action for each slot."""
        actions = self._each("actions", actions)
        asked = [index for index, slot in enumerate(self._slots) if slot.is_running and actions[index] is not None]

        def step(index: int, worker: Any) -> BaseTextEnvStepOutput:
            return worker.call(index, "step", (actions[index],), self.timeout_seconds)

        outputs = self._in_every_slot(step, asked)
        for index in asked:
            if not isinstance(outputs[index], Failed) and outputs[index]["done"]:
                self._slots[index].is_running = False
        return outputs

    def metrics(self) -> list[dict[str, Any] | Failed]:
        """`get_metrics` of every slot, or its failure."""
        asked = [index for index, slot in enumerate(self._slots) if slot.failure is None]
        return self._in_every_slot(lambda index, worker: worker.call(index, "metrics", (), self.timeout_seconds), asked)

    def close(self) -> None:
        """Closes the environments and ends threads and processes. May be called more than once."""
        if self._pool is None:
            return
        list(self._pool.map(lambda worker: worker.close(self.timeout_seconds), self._workers))
        self._pool.shutdown()
        self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _in_every_slot(self, function: Callable[[int, Any], Any], asked: Sequence[int]) -> list[Any]:
        """Results in order: the function's for the slots asked, the failure or None for the others."""
        if self._pool is None:
            raise RuntimeError("these environments are closed")
        by_worker = [[index for index in asked if self._slots[index].worker == w] for w in range(len(self._workers))]
        results: list[Any] = [None] * len(self)

        def work(worker_index: int) -> None:
            for index in by_worker[worker_index]:
                results[index] = self._attempt(function, index)

        list(self._pool.map(work, range(len(self._workers))))
        for index, slot in enumerate(self._slots):
            if slot.failure is not None:
                results[index] = slot.failure
        return results

    def _attempt(self, function: Callable[[int, Any], Any], index: int) -> Any:
        slot = self._slots[index]
        if slot.failure is not None:
            return slot.failure
        try:
            return function(index, self._workers[slot.worker])
        except _WorkerLost as lost:
            for other_index, other in enumerate(self._slots):
                if other.worker == slot.worker and other.failure is None:
                    self._fail(other, lost.error if other_index == index else lost.error_of_neighbours(index), "")
        except _Raised as raised:
            self._fail(slot, raised.error, raised.traceback)
        except Exception as error:  # environments are users' code: whatever they raise is this slot's result
            self._fail(slot, error, traceback.format_exc())
        return None

    def _fail(self, slot: _Slot, error: Exception, text: str) -> None:
        slot.failure, slot.is_running = Failed(error, text), False

    def _each(self, name: str, values: Sequence[Any]) -> list[Any]:
        if isinstance(values, str) or len(values) != len(self):
            raise ValueError(f"{name} must be one for each of the {len(self)} environments; got {len(values)}")
        return list(values)

    def _own_prompts(self) -> list[ConversationType]:
        missing = [index for index, (prompt, _) in enumerate(self.tasks) if prompt is None]
        if missing:
            raise ValueError(f"init needs prompts: row {missing[0]} has no column `prompt`")
        return [prompt for prompt, _ in self.tasks if prompt is not None]


def make_vec(
    id: str | EnvSpec,
    rows: Sequence[Mapping[str, Any]],
    *,
    mode: Literal["thread", "process"] = "thread",
    num_workers: int | None = None,
    env_config: Any = None,
    timeout_seconds: float = 60.0,
) -> VecEnv:
    """Many environments of one id, one for each dataset row.

    Args:
        rows: with a column `prompt` (see `VecEnv.init`) or without; the other columns become the environment's extras.
        mode: threads are cheap and share the interpreter; a process can be killed when it hangs, and its death is only
            its own. Processes need an entry point that they can import, and rows that pickle.
        num_workers: threads or processes; one for each row if not given.
        timeout_seconds: deadline of each call: of `init` (with the constructor), `step`, `close`.

    Raises:
        Error: no environment of that id.
        ValueError: no rows, an unknown mode, too few workers, or (mode process) a spec that does not pickle.
        RuntimeError: mode process, called while a spawned process imports the main script (no main guard).
    """
    env_spec = spec(id) if isinstance(id, str) else id
    if not rows:
        raise ValueError("make_vec needs at least one row")
    if mode not in ("thread", "process"):
        raise ValueError(f"mode must be thread or process; got {mode!r}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1; got {num_workers}")
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds must be positive; got {timeout_seconds}")
    tasks = [(row.get("prompt"), {name: row[name] for name in row if name != "prompt"}) for row in rows]
    if mode == "process":
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # set while a child imports `__main__`
            raise RuntimeError(NO_MAIN_GUARD)
        _check_pickles(env_spec, env_config)
    worker_class = _ThreadWorker if mode == "thread" else _ProcessWorker
    workers = [worker_class() for _ in range(min(num_workers or len(rows), len(rows)))]
    return VecEnv(env_spec, tasks, workers, timeout_seconds, env_config)


def _check_pickles(env_spec: EnvSpec, env_config: Any) -> None:
    try:
        pickle.dumps((env_spec, env_config))
    except Exception as failure:  # pickle raises what it likes
        raise ValueError(
            f"env {env_spec.id!r} cannot be sent to a process ({failure}): register it as 'package.module:Class'"
        ) from failure


class _WorkerLost(Exception):
    """A worker hung or died. Its environments are gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def error_of_neighbours(self, index: int) -> Exception:
        return RuntimeError(f"its worker was lost in a call of slot {index}: {self.error}")


class _Raised(Exception):
    """What an environment raised in another process."""

    def __init__(self, error: Exception, traceback: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.traceback = traceback


@dataclass
class _Episodes:
    """The environments of one worker, by slot. Lives where they live."""

    episodes: dict[int, Episode] = field(default_factory=dict)

    def start(
        self, index: int, env_spec: EnvSpec, env_config: Any, extras: dict[str, Any], prompt: Any, seed: int | None
    ) -> ConversationType:
        """Ends the slot's episode if there is one, and starts another."""
        if (old := self.episodes.pop(index, None)) is not None:
            old.close()
        episode = Episode(make(env_spec, env_config=env_config, extras=extras))
        self.episodes[index] = episode
        return episode.init(prompt, seed)

    def step(self, index: int, action: str) -> BaseTextEnvStepOutput:
        return self.episodes[index].step(action)

    def metrics(self, index: int) -> dict[str, Any]:
        return self.episodes[index].metrics()

    def close(self, index: int) -> None:
        """Closes all; one that raises does not keep the others open."""
        with contextlib.ExitStack() as stack:
            for episode in self.episodes.values():
                stack.callback(episode.close)
            self.episodes.clear()


class _ThreadWorker:
    """Environments in this process. Every call has a thread of its own, as in the trainer."""

    def __init__(self) -> None:
        self._episodes = _Episodes()

    def revive(self) -> None:
        """Nothing to do: a lost worker has left its environments to the call that hangs."""

    def call(self, index: int, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        try:
            return call_before_deadline(seconds, getattr(self._episodes, method), index, *arguments)
        except DeadlineExceeded as late:
            self._episodes = _Episodes()
            raise _WorkerLost(late) from late

    def close(self, seconds: float) -> None:
        with contextlib.suppress(_WorkerLost):
            self.call(-1, "close", (), seconds)


class _ProcessWorker:
    """Environments in a process of their own, spawned when first used."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._is_ready = False

    def revive(self) -> None:
        """Starts the process, if it does not run. Does not wait for it."""
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, childs_end = context.Pipe()
        self._is_ready = False
        # A daemon: multiprocessing ends it if this process ends without close.
        self._process = context.Process(target=_serve, args=(childs_end,), daemon=True, name="skyrl-gym-vec")
        self._process.start()
        childs_end.close()

    def call(self, index: int, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        assert self._connection is not None
        if not self._is_ready:
            self._receive(START_SECONDS)
            self._is_ready = True
        try:
            self._connection.send((index, method, arguments))
        except OSError as broken:  # it died since its last answer
            raise self._lost() from broken
        is_good, result = self._receive(seconds)
        if is_good:
            return result
        raise _Raised(*result)

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError) as ended:
            raise self._lost() from ended
        self._end()
        raise _WorkerLost(DeadlineExceeded(f"did not return within {seconds:g} s; its process was killed"))

    def _lost(self) -> _WorkerLost:
        assert self._process is not None
        self._process.join(5)
        code = self._process.exitcode
        self._end()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        text = f"the environment's process ended with {how}"
        return _WorkerLost(RuntimeError(text if self._is_ready else f"{text} before it was ready. {NO_MAIN_GUARD}"))

    def _end(self) -> None:
        """Kills the process and what it started, as far as that stayed in its group."""
        process, connection = self._process, self._connection
        if process is not None and process.pid is not None and process.is_alive():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not made its group yet
                process.kill()
        if process is not None:
            process.join(5)
            process.close()
        if connection is not None:
            connection.close()
        self._process = self._connection = None

    def close(self, seconds: float) -> None:
        if self._process is None:
            return
        # What an environment raises while it is closed has nobody left to go to.
        with contextlib.suppress(_WorkerLost, _Raised):
            self.call(-1, "close", (), seconds)
        self._end()


def _serve(connection: Connection) -> None:
    """What a process does: answers calls until its parent is gone or kills it."""
    os.setsid()  # Ctrl-C is the parent's; and what environments start can be killed with this process
    episodes = _Episodes()
    connection.send("ready")
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            episodes.close(-1)
            return
        try:
            index, method, arguments = pickle.loads(call)
            answer = (True, getattr(episodes, method)(index, *arguments))
            pickle.dumps(answer)
        except Exception as error:  # environments are users' code: whatever they raise is sent home
            answer = (False, (_portable(error), traceback.format_exc()))
        connection.send(answer)


def _portable(error: Exception) -> Exception:
    """The exception itself if it survives pickling, else one that says the same."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # pickle raises what it likes
        return RuntimeError(f"{type(error).__name__}: {error}")
