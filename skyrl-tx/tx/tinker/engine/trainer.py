"""Training thread: executes the commands of models with a backend, turn by turn.

Messages and results of helpers arrive through `inbox`; reports leave by `send`. The scheduler chooses the order,
`Models` manages memory. A failed command fails alone and leaves no effect.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from loguru import logger

from skyrl_gym.waits import NEXT_CALL, waiting
from tx.errors import ModelError
from tx.tinker.backends.base import Failure, TrainingBackend
from tx.tinker.commands import CreateModel, ExecutionContext, ModelCommand, Optimize, Steps, Train, Unload
from tx.tinker.engine.helpers import Helpers
from tx.tinker.engine.messages import Done, Failed, FromEngine, Restore
from tx.tinker.engine.models import Model, Models, resume_steps
from tx.tinker.engine.passes import NOTHING, PassResult, RunningPass
from tx.tinker.engine.scheduler import ModelQueue, Scheduler
from tx.tinker.storage.folders import Folders
from tx.tinker.types import SERVER, LoraSpec, PassOutput, TrainingPass
from tx.tinker.wire.codec import decode_training

QUICK_SECONDS = 0.1
"""Time limit for new rounds of quick commands within a turn."""


class Trainer:
    """
    Args:
        training: the backend
        models: over the same backend
        folders: where checkpoints stand
        send: reports to the API process; called in the training thread
        pass_tokens: no further micro-batch joins a pass that it would make larger
        now: seconds
    """

    def __init__(
        self,
        training: TrainingBackend,
        models: Models,
        folders: Folders,
        send: Callable[[FromEngine], None],
        *,
        pass_tokens: int = 8192,
        now: Callable[[], float] = time.monotonic,
    ):
        self.inbox: SimpleQueue[ModelCommand | Restore | Callable[[], None]] = SimpleQueue()
        self.train_tokens: Counter[str] = Counter()
        """Trained tokens by tenant, without replays."""
        self.busy_seconds = 0.0
        self._training, self._models, self._send = training, models, send
        self._context = ExecutionContext(training, folders, models.forget)
        self._pass_tokens, self._now = pass_tokens, now
        self._scheduler = Scheduler(models.admitted, now)
        self._turn_began: float | None = None
        self._running: dict[str, RunningPass] = {}
        self._held: set[str] = set()
        self._helpers = Helpers(self.inbox.put)

    def step(self, wait_seconds: float) -> bool:
        """Process the inbox and take a turn; wait for a message if idle. Returns: True if there was work"""
        self._turn_began = self._now()
        came = self._read_inbox(0.0)
        worked = self._run_turn()
        if not came and not worked:
            self._turn_began = None
            with waiting(NEXT_CALL, on=SERVER):
                came = self._read_inbox(wait_seconds)
        for snapshotted in self._models.completed_snapshots():  # after the results of what they contain
            self._send(snapshotted)
        return came or worked

    def num_commands(self) -> int:
        return self._scheduler.num_commands

    def turn_seconds(self) -> float:
        """Return the duration of the present turn; 0 while idle. Thread-safe."""
        began = self._turn_began
        return 0.0 if began is None else self._now() - began

    def close(self, seconds: float) -> None:
        """Write snapshots of changed models while there is time, so that the next engine replays little."""
        deadline = self._now() + seconds
        for model in self._models.changed():
            if self._now() < deadline and not self._is_busy(model.model_id):
                self._run_background_snapshot(self._models.write_snapshot(model))
        while self._models.is_writing() and self._now() < deadline:
            self._read_inbox(0.1)
        for snapshotted in self._models.completed_snapshots():
            self._send(snapshotted)
        self._helpers.close()

    def _read_inbox(self, wait_seconds: float) -> bool:
        came = False
        while True:
            try:
                item = self.inbox.get(block=not came and wait_seconds > 0, timeout=wait_seconds)
            except Empty:
                return came
            came = True
            if self._turn_began is None:
                self._turn_began = self._now()
            if isinstance(item, Restore):
                self._models.add(Model(item.model_id, item.tenant, item.lora, seq=item.seq, snapshot=item.snapshot))
            elif isinstance(item, ModelCommand):
                self._scheduler.add(item)
            else:
                item()

    def _run_turn(self) -> bool:
        started = self._now()
        worked = self._run_quick_commands(started + QUICK_SECONDS)
        worked = self._run_pass() or worked
        if worked:
            self.busy_seconds += self._now() - started
        elif model := self._models.at_rest(self._is_busy):
            self._run_background_snapshot(self._models.write_snapshot(model))
        return worked

    def _is_busy(self, model_id: str) -> bool:
        return model_id in self._running or model_id in self._held

    def _get_model(self, command: ModelCommand) -> Model | None:
        """Return the command's model, loaded into memory; None without a free slot."""
        model = self._models.get(command.model_id)
        if model is None and isinstance(
            command, CreateModel | Unload
        ):  # a model whose creation failed may still be unloaded
            model = Model(
                command.model_id, command.tenant, command.lora if isinstance(command, CreateModel) else LoraSpec()
            )
            if isinstance(command, CreateModel):
                self._models.add(model)
        if model is None:
            raise ModelError("the engine has not loaded this model", "server")
        if command.seq <= model.seq:
            raise ModelError(f"command {command.seq} arrived after {model.seq} was executed", "server")
        if isinstance(command, Unload):
            return model
        self._models.check(model)
        return model if self._models.onload(model, self._is_busy) else None

    # ---- quick commands

    def _run_quick_commands(self, deadline: float) -> bool:
        worked = False
        while any([self._run_quick_command(queue) for queue in self._scheduler.quick_round()]):
            worked = True
            if self._now() >= deadline:
                break
        return worked

    def _run_quick_command(self, queue: ModelQueue) -> bool:
        model, before = None, self._scheduler.num_commands
        with self._handle_failure(queue):
            model = self._get_model(queue.commands[0])
        if model is None:
            return self._scheduler.num_commands < before
        queue.held = True
        self._held.add(queue.model_id)
        command = queue.commands[0]
        steps = self._execute(model, command)
        with waiting(f"{type(command).__name__} {command.request_id}"):
            self._advance(steps, lambda result: self._send_done(queue, *result), partial(self._send_failed, queue))
        return True

    def _execute(self, model: Model, command: ModelCommand) -> Steps:
        """Carry a quick command out. Returns: its result as JSON, its metrics, and the bytes written to storage."""
        started = self._now()
        result = yield from command.execute(self._context)
        self._models.done(model, command.seq, seconds=self._now() - started, changed=command.changes_model)
        if command.source_folder is not None:
            yield from self._models.write_snapshot(model)
        body = json.dumps({} if result.metrics is None else {"metrics": result.metrics}).encode()
        return body, result.metrics or {}, result.size_bytes

    def _run_background_snapshot(self, steps: Steps) -> None:
        """Run the steps of a snapshot that no command waits for. If it fails, a later one replaces it."""
        self._advance(steps, lambda _: None, _log_lost_snapshot)

    def _advance(
        self,
        steps: Steps,
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
        outcome: Future[object] | None = None,
    ) -> None:
        try:
            job = resume_steps(steps, outcome)
        except StopIteration as end:
            done(end.value)
        except Exception as error:  # reported by `failed`
            failed(error)
        else:
            self._helpers.start(job, partial(self._advance, steps, done, failed))

    # ---- passes

    def _run_pass(self) -> bool:
        """Run one micro-batch of each of several models. Returns: False if there was none."""
        joined: list[tuple[ModelQueue, RunningPass]] = []
        tokens, before = 0, self._scheduler.num_commands
        for queue in self._scheduler.pass_candidates():
            running = self._open(queue)
            if running is None:
                continue
            if joined and tokens + running.tokens > self._pass_tokens:
                break
            tokens += running.tokens
            joined.append((queue, running))
            self._scheduler.charge(queue, running.tokens)
        if joined:
            self._run_together(joined, tokens)
        return bool(joined) or self._scheduler.num_commands < before

    def _open(self, queue: ModelQueue) -> RunningPass | None:
        """Return the pass at the head of a queue; None if it cannot run now or is finished already."""
        if queue.model_id in self._running:
            return self._running[queue.model_id]
        command = queue.commands[0]
        assert isinstance(command, Train)
        with self._handle_failure(queue):
            if self._get_model(command) is None:
                return None
            request = decode_training(command.payload)
            if command.replay and request.forward_only:
                self._process_pass_result(queue, command, changed=False)
                return None
            running = RunningPass(command, request, self._training.micro_batches(request.data))
            if running.adds_gradient and len(running.parts) > 1:
                running.gradient_before = self._training.copy_gradient(queue.model_id)
            self._running[queue.model_id] = running
        return self._running.get(queue.model_id)

    def _run_together(self, joined: list[tuple[ModelQueue, RunningPass]], tokens: int) -> None:
        started = self._now()
        others = f" and {len(joined) - 1} others" if len(joined) > 1 else ""
        with waiting(f"a pass of {joined[0][1].command.request_id}{others}"):
            outputs = self._run([running.next_part() for _, running in joined])
        seconds = self._now() - started
        for (queue, running), output in zip(joined, outputs, strict=True):
            running.seconds += seconds * running.tokens / max(tokens, 1)
            if isinstance(output, Failure):
                self._reset_gradients(running)
                self._send_failed(queue, output.error)
            else:
                self._process_output(queue, running, output)

    def _run(self, passes: list[TrainingPass]) -> list[PassOutput | Failure]:
        try:
            return self._training.run(passes)
        except Exception as error:  # each model is tried alone
            if len(passes) == 1:
                return [Failure(error)]
            logger.warning("a pass of {} models failed ({!r}); retrying each separately", len(passes), error)
            return [output for one in passes for output in self._run([one])]

    def _process_output(self, queue: ModelQueue, running: RunningPass, output: PassOutput) -> None:
        if not running.command.replay:
            self.train_tokens[queue.tenant] += running.tokens
        running.outputs.append(output)
        if not running.done:
            return
        result = None
        with self._handle_failure(queue, running):
            result = NOTHING if running.command.replay else running.result()
        if result is not None:
            self._process_pass_result(
                queue, running.command, result, seconds=running.seconds, changed=running.adds_gradient
            )

    def _reset_gradients(self, running: RunningPass) -> None:
        """Undo the gradient of the micro-batches that succeeded."""
        if not running.outputs or not running.adds_gradient:
            return
        if len(running.parts) > 1:
            self._training.put_gradient(running.command.model_id, running.gradient_before)
        elif model := self._models.get(running.command.model_id):
            self._models.damage(model, "a request failed after its gradient was added")

    def _process_pass_result(
        self,
        queue: ModelQueue,
        command: Train,
        result: PassResult = NOTHING,
        *,
        seconds: float = 0.0,
        changed: bool,
    ) -> None:
        if model := self._models.get(command.model_id):
            num_bytes = len(command.payload)
            self._models.done(model, command.seq, seconds=seconds, num_bytes=num_bytes, changed=changed)
        self._send_done(queue, result.body, result.metrics)

    # ---- reports

    def _send_done(self, queue: ModelQueue, result: bytes, metrics: dict[str, float], size_bytes: int = 0) -> None:
        command = self._remove_first(queue)
        if not command.replay:
            done = Done(request_id=command.request_id, result=result, size_bytes=size_bytes, metrics=metrics)
            self._send(done)
        if (model := self._models.get(command.model_id)) and self._models.is_due(model):
            self._run_background_snapshot(self._models.write_snapshot(model))

    def _send_failed(self, queue: ModelQueue, error: BaseException) -> None:
        command, model = self._remove_first(queue), self._models.get(queue.model_id)
        failed = Failed.of(command.request_id, error)
        failed_before = isinstance(command, Optimize) and isinstance(error, ModelError)  # the only failures done again
        if command.replay and model and not failed_before:
            self._models.damage(model, f"commands executed before a restart could not be replayed: {failed.error}")
        elif isinstance(command, CreateModel):
            self._models.forget(command.model_id)
        elif model and command.seq > model.seq:  # a step with a non-finite gradient has cleared it
            self._models.done(model, command.seq, seconds=0.0, changed=isinstance(command, Optimize))
        if not command.replay:
            self._send(failed)

    @contextmanager
    def _handle_failure(self, queue: ModelQueue, running: RunningPass | None = None) -> Iterator[None]:
        """Turn an error into the failure of a queue's first command, and undo what a pass added."""
        try:
            yield
        except Exception as error:  # reported as this command's failure
            if running is not None:
                self._reset_gradients(running)
            self._send_failed(queue, error)

    def _remove_first(self, queue: ModelQueue) -> ModelCommand:
        """Remove the first command from its queue."""
        command = queue.commands[0]
        self._running.pop(queue.model_id, None)
        self._held.discard(queue.model_id)
        self._scheduler.finish(queue)
        return command


def _log_lost_snapshot(error: Exception) -> None:
    logger.opt(exception=error).error("a snapshot could not be written")
