"""Runner of an evaluation: plays episodes concurrently and records each one as it ends."""

import copy
import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from skyrl_gym.check import spec_of
from skyrl_gym.core import Env
from skyrl_gym.deadline import DeadlineExceeded, call_before_deadline
from skyrl_gym.envs.base_text_env import ConversationType, Example
from skyrl_gym.envs.registration import env_class_of, make
from skyrl_gym.episode import EpisodeResult, run_episode
from skyrl_gym.error import Error, InfraError
from skyrl_gym.eval.endpoint import Cancelled, ChatEndpoint, EndpointRefused, ModelError, Reply
from skyrl_gym.eval.records import EpisodeFile, EpisodeRecord, FailureKind
from skyrl_gym.eval.rows import read_tasks
from skyrl_gym.eval.settings import EvalSettings, SettingsError
from skyrl_gym.eval.summary import Summary, summarize

LEAVE_SECONDS = 5.0
"""Time that episodes have to end when an evaluation is stopped."""


class Stopped(KeyboardInterrupt):
    """An evaluation was interrupted; `summary` is what it has so far."""

    def __init__(self, summary: Summary) -> None:
        super().__init__()
        self.summary = summary


def evaluate(settings: EvalSettings, *, progress: bool = False) -> Summary:
    """Play the episodes that `settings.output` does not have yet, and summarize all of them.

    Raises:
        Error: a setting is wrong, or the endpoint fails repeatedly; finished episodes are kept.
        Stopped: on KeyboardInterrupt. Finished episodes are kept, and unfinished ones are written up to their last
        turn.
    """
    env_spec = spec_of(settings.env)
    try:
        env_class_of(env_spec)
    except (ImportError, AttributeError, ValueError) as failure:
        raise SettingsError(f"--env {settings.env} cannot be imported: {failure}") from failure
    tasks, digest = read_tasks(settings.env, settings.data, settings.limit)
    with EpisodeFile(settings.output, settings.identity(digest)) as file:
        wanted = [(task, sample) for sample in range(settings.num_samples) for task in range(len(tasks))]
        missing = [key for key in wanted if not file.is_finished(key)]
        if missing:
            # Threads, not processes: an episode mostly waits for the endpoint.
            crew = _EpisodeThreads(
                settings, lambda config, extras: make(env_spec, env_config=config, extras=extras), tasks
            )
            bar = tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="episode", disable=not progress)
            try:
                with crew, bar:
                    _collect(crew, missing, file, bar)
            except KeyboardInterrupt as interrupt:
                raise Stopped(_write_summary(settings, len(tasks), file)) from interrupt
        return _write_summary(settings, len(tasks), file)


def _write_summary(settings: EvalSettings, num_tasks: int, file: EpisodeFile) -> Summary:
    summary = summarize(settings, num_tasks, file.records.values())
    (settings.output / "summary.json").write_text(json.dumps(summary.as_json(), indent=2, default=str) + "\n")
    return summary


def _collect(crew: "_EpisodeThreads", missing: list[tuple[int, int]], file: EpisodeFile, bar: object) -> None:
    """Write records as they arrive, finally the records of truncated episodes. Raises errors that affect all
    episodes.
    """
    try:
        _collect_finished(crew, missing, file, bar)
    finally:
        for record in crew.stop():
            file.add(record)


def _collect_finished(crew: "_EpisodeThreads", missing: list[tuple[int, int]], file: EpisodeFile, bar: Any) -> None:
    # Two failures per thread: one bad moment of a server fails at most one episode of each thread.
    patience = max(10, 2 * crew.settings.concurrency)
    infra_in_a_row = num_failed = num_right = num_scored = 0
    for record in crew.play(missing):
        file.add(record)
        bar.update()
        num_failed += record.failure is not None
        num_scored += record.failure is None
        num_right += bool(record.success)
        infra_in_a_row = infra_in_a_row + 1 if record.failure == "infra" else 0
        nothing_works = num_scored == 0 and num_failed >= patience
        bar.set_postfix_str(f"right {num_right}/{num_scored}, failed {num_failed}", refresh=False)
        if infra_in_a_row >= patience or nothing_works:
            raise InfraError(
                f"{num_failed if nothing_works else infra_in_a_row} episodes in a row failed; last: {record.failure}, "
                f"{record.error}. Finished episodes are kept: run again to continue"
            )


@dataclass
class _Player:
    """The model's side of one episode: asks the endpoint, and remembers what was said and what it cost."""

    endpoint: ChatEndpoint
    seed: int | None = None
    messages: ConversationType = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    is_waiting: bool = False
    is_abandoned: bool = False

    def __call__(self, messages: ConversationType) -> str:
        if self.is_abandoned:
            raise Cancelled
        self.messages = messages
        self.is_waiting = True
        # A seed per turn: with one for all turns a server would repeat its random numbers in each.
        reply = self.endpoint.complete(messages, None if self.seed is None else self.seed + len(self.replies))
        self.is_waiting = False
        self.replies.append(reply)
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply.text


class _EpisodeThreads:
    """Threads that play episodes. They are daemons: one that hangs does not keep the process from ending."""

    def __init__(self, settings: EvalSettings, make_env: Callable[..., Env], tasks: list[Example]) -> None:
        self.settings = settings
        self.make_env = make_env
        self.tasks = tasks
        self.cancelled = threading.Event()
        self._waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[EpisodeRecord | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._playing: dict[tuple[int, int], _Player] = {}
        sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
        self.endpoint = ChatEndpoint(
            settings.base_url,
            settings.model,
            sampling={name: value for name, value in sampling.items() if value is not None} | dict(settings.extra_body),
            stop=settings.stop,
            api_key=os.environ.get(settings.api_key_env),
            max_retries=settings.max_retries,
            retry_seconds=settings.retry_seconds,
            request_seconds=settings.request_seconds,
            cancelled=self.cancelled,
        )

    def __enter__(self) -> "_EpisodeThreads":
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.close()

    def stop(self) -> list[EpisodeRecord]:
        """Stop all episodes. Returns the records that `play` did not yield, including unfinished episodes."""
        self.cancelled.set()
        # One deadline for all threads together, not one for each.
        leave_at = time.monotonic() + LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(leave_at - time.monotonic(), 0.0))
        found = []
        while not self._finished.empty():
            found.append(self._finished.get())
        records = [record for record in found if isinstance(record, EpisodeRecord)]
        ended = {record.key for record in records}
        for key, player in list(self._playing.items()):  # their threads hang
            if key not in ended:
                records.append(_make_unfinished_record(EpisodeRecord(task=key[0], sample=key[1]), player))
        return records

    def play(self, keys: list[tuple[int, int]]) -> Any:
        """Yield records as episodes end. Raises Error if the endpoint cannot be reached or refuses."""
        try:
            self.endpoint.check()
        except InfraError as dead:
            raise Error(f"no response from --base-url: {dead}") from dead
        for key in keys:
            self._waiting.put(key)
        for _ in range(min(self.settings.concurrency, len(keys))):
            # Daemons, so that an episode that hangs does not keep the process from ending.
            thread = threading.Thread(target=self._run_worker, name="skyrl-gym-eval", daemon=True)
            thread.start()
            self._threads.append(thread)
        # Records arrive in the order in which episodes end; an exception of a thread ends the evaluation.
        for _ in keys:
            result = self._finished.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _run_worker(self) -> None:
        while not self.cancelled.is_set():
            try:
                key = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._finished.put(self._run_episode(*key))
            except BaseException as error:  # carried to the main thread: going on is pointless
                self._finished.put(error)
                return
            # Only now: `stop` finds unfinished episodes in `_playing`.
            self._playing.pop(key, None)

    def _run_episode(self, task: int, sample: int) -> EpisodeRecord:
        record = EpisodeRecord(task=task, sample=sample)
        player = _Player(self.endpoint, _make_seed(self.settings.seed, task, sample))
        self._playing[record.key] = player
        started = time.perf_counter()
        try:
            result = call_before_deadline(self.settings.episode_seconds, self._run, task, sample, player)
            self._fill(record, result)
        # A refusal (authentication, unknown model) is the same for all episodes.
        except EndpointRefused:
            raise
        except Cancelled:
            _make_unfinished_record(record, player)
        except Exception as error:  # environments are users' code: whatever they raise ends this episode only
            player.is_abandoned = True
            record.failure = _get_failure_kind(error, player)
            record.error = f"{type(error).__name__}: {error}"[:2000]
            record.messages = player.messages
        record.seconds = time.perf_counter() - started
        record.finish_reasons = [reply.finish_reason for reply in player.replies]
        record.prompt_tokens = sum(reply.prompt_tokens for reply in player.replies)
        record.completion_tokens = sum(reply.completion_tokens for reply in player.replies)
        record.model_seconds = sum(reply.seconds for reply in player.replies)
        return record

    def _run(self, task: int, sample: int, player: _Player) -> EpisodeResult:
        example = self.tasks[task]
        extras = copy.deepcopy(example.extras)
        if self.settings.max_turns is not None:
            extras["max_turns"] = self.settings.max_turns
        env = self.make_env({**example.env_config, **self.settings.env_config}, extras)
        return run_episode(env, copy.deepcopy(example.prompt), player, seed=player.seed)

    def _fill(self, record: EpisodeRecord, result: EpisodeResult) -> None:
        record.messages = result.messages
        record.rewards = result.rewards
        record.reward = result.total_reward
        record.outcome_reward = result.outcome_reward
        record.success = result.outcome_reward >= self.settings.success_at - 1e-9
        record.done = result.done
        record.truncated = result.truncated
        record.metrics = result.metrics


def _make_unfinished_record(record: EpisodeRecord, player: _Player) -> EpisodeRecord:
    """Make the record of an unfinished episode."""
    player.is_abandoned = True
    record.failure, record.error, record.messages = "cancelled", "the evaluation was stopped", player.messages
    return record


def _make_seed(seed: int | None, task: int, sample: int) -> int | None:
    """Derive the seed of one episode, in 31 bits: servers read it as a signed number."""
    return None if seed is None else zlib.crc32(f"{seed}/{task}/{sample}".encode()) >> 1


def _get_failure_kind(error: Exception, player: _Player) -> FailureKind:
    if isinstance(error, InfraError) or (isinstance(error, DeadlineExceeded) and player.is_waiting):
        return "infra"
    return "model" if isinstance(error, ModelError) else "environment"
