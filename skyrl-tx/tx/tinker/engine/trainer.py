"""What the training thread does: carries out the orders of models with a backend, turn by turn.

It knows no sockets. Messages and outcomes of helpers come through `inbox`; reports leave by `send`. Whose turn it is
says the scheduler, which models are in memory say the models. An order that fails fails alone, and leaves nothing.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from loguru import logger

from tx.errors import ModelError, RequestError
from tx.tinker.backends.base import Failure, TrainingBackend
from tx.tinker.engine.helpers import Helpers, Job
from tx.tinker.engine.messages import (
    CreateModel,
    Done,
    Failed,
    FromEngine,
    ModelOrder,
    Optimize,
    Restore,
    Train,
    Unload,
)
from tx.tinker.engine.models import Model, Models, Steps
from tx.tinker.engine.orders import Orders
from tx.tinker.engine.passes import RunningPass
from tx.tinker.engine.scheduler import ModelQueue, Scheduler
from tx.tinker.storage.folders import Folders
from tx.tinker.types import LoraSpec, PassOutput, TrainingPass
from tx.tinker.wire.codec import decode_training

QUICK_SECONDS = 0.1
"""No new round of quick orders after this long in a turn."""


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
        self.inbox: SimpleQueue[ModelOrder | Restore | Callable[[], None]] = SimpleQueue()
        self.train_tokens: Counter[str] = Counter()
        """By tenant; what is done again after a crash does not count."""
        self.busy_seconds = 0.0
        self._training, self._models, self._send = training, models, send
        self._orders = Orders(training, models, folders, now)
        self._pass_tokens, self._now = pass_tokens, now
        self._scheduler = Scheduler()
        self._turn_began: float | None = None
        self._running: dict[str, RunningPass] = {}
        self._held: set[str] = set()
        self._helpers = Helpers(self.inbox.put)

    def step(self, wait_seconds: float) -> bool:
        """Reads what came and takes a turn; waits so long for something to come if there is nothing to do.

        Returns:
            whether there was something
        """
        self._turn_began = self._now()
        came = self._read_inbox(0.0)
        worked = self._turn()
        if not came and not worked:
            self._turn_began = None
            came = self._read_inbox(wait_seconds)
        for snapshotted in self._models.news():  # after the results of what they contain
            self._send(snapshotted)
        return came or worked

    def num_orders(self) -> int:
        return self._scheduler.num_orders

    def turn_seconds(self) -> float:
        """How long the present turn takes already; 0 while there is nothing to do. May be asked in any thread."""
        began = self._turn_began
        return 0.0 if began is None else self._now() - began

    def close(self, seconds: float) -> None:
        """Puts changed models to disk as long as there is time, so that the next engine has little to do again."""
        deadline = self._now() + seconds
        for model in self._models.changed():
            if self._now() < deadline and not self._is_busy(model.model_id):
                self._beside(self._models.write_snapshot(model))
        while self._models.is_writing() and self._now() < deadline:
            self._read_inbox(0.1)
        for snapshotted in self._models.news():
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
            elif isinstance(item, ModelOrder):
                self._scheduler.add(item)
            else:
                item()

    def _turn(self) -> bool:
        started = self._now()
        worked = self._quick_orders(started + QUICK_SECONDS)
        worked = self._one_pass() or worked
        if worked:
            self.busy_seconds += self._now() - started
        elif model := self._models.at_rest(self._is_busy):
            self._beside(self._models.write_snapshot(model))
        return worked

    def _is_busy(self, model_id: str) -> bool:
        return model_id in self._running or model_id in self._held

    def _model_of(self, order: ModelOrder) -> Model | None:
        """The model that an order is for, in memory; None: there is no room for it now."""
        model = self._models.get(order.model_id)
        if model is None and isinstance(order, CreateModel | Unload):  # one whose creation failed may be unloaded too
            model = Model(order.model_id, order.tenant, order.lora if isinstance(order, CreateModel) else LoraSpec())
            if isinstance(order, CreateModel):
                self._models.add(model)
        if model is None:
            raise ModelError("the engine does not have this model", "server")
        if order.seq <= model.seq:
            raise ModelError(f"order {order.seq} came when {model.seq} was done already", "server")
        if isinstance(order, Unload):
            return model
        self._models.check(model)
        return model if self._models.bring(model, self._is_busy) else None

    # ---- quick orders

    def _quick_orders(self, deadline: float) -> bool:
        worked = False
        while any([self._quick_order(queue) for queue in self._scheduler.quick_round()]):
            worked = True
            if self._now() >= deadline:
                break
        return worked

    def _quick_order(self, queue: ModelQueue) -> bool:
        try:
            model = self._model_of(queue.orders[0])
        except Exception as error:
            self._failed(queue, error)
            return True
        if model is None:
            return False
        self._advance(queue, self._orders.steps(model, queue.orders[0]))
        return True

    def _advance(self, queue: ModelQueue, steps: Steps, outcome: Future[Any] | None = None) -> None:
        try:
            job = _next_job(steps, outcome)
        except StopIteration as end:
            result, size_bytes = end.value
            self._done(queue, result, size_bytes)
        except Exception as error:
            self._failed(queue, error)
        else:
            queue.held = True
            self._held.add(queue.model_id)
            self._helpers.start(job, partial(self._advance, queue, steps))

    def _beside(self, steps: Steps, outcome: Future[Any] | None = None) -> None:
        """The same for a snapshot that no order waits for."""
        try:
            job = _next_job(steps, outcome)
        except StopIteration:
            return
        except Exception as error:
            logger.opt(exception=error).error("a snapshot could not be written")
        else:
            self._helpers.start(job, partial(self._beside, steps))

    # ---- passes

    def _one_pass(self) -> bool:
        """One micro-batch of each of several models. False if there was nothing to do."""
        joined: list[tuple[ModelQueue, RunningPass]] = []
        tokens, before = 0, self._scheduler.num_orders
        for queue in self._scheduler.pass_order():
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
        return bool(joined) or self._scheduler.num_orders < before

    def _open(self, queue: ModelQueue) -> RunningPass | None:
        """The pass that a queue begins with; None: it cannot run now, or is finished already."""
        if queue.model_id in self._running:
            return self._running[queue.model_id]
        order = queue.orders[0]
        assert isinstance(order, Train)
        try:
            if self._model_of(order) is None:
                return None
            request = decode_training(order.payload)
            if order.replay and request.forward_only:
                self._pass_done(queue, order, changed=False)
                return None
            running = RunningPass(order, request, self._training.micro_batches(request.data))
            if running.adds_gradient and len(running.parts) > 1:
                running.gradient_before = self._training.copy_gradient(queue.model_id)
        except Exception as error:
            self._failed(queue, error)
            return None
        self._running[queue.model_id] = running
        return running

    def _run_together(self, joined: list[tuple[ModelQueue, RunningPass]], tokens: int) -> None:
        started = self._now()
        outputs = self._run([running.next_part() for _, running in joined])
        seconds = self._now() - started
        for (queue, running), output in zip(joined, outputs, strict=True):
            running.seconds += seconds * running.tokens / max(tokens, 1)
            if isinstance(output, Failure):
                self._undo(running)
                self._failed(queue, output.error)
            else:
                self._take(queue, running, output)

    def _run(self, passes: list[TrainingPass]) -> list[PassOutput | Failure]:
        try:
            return self._training.run(passes)
        except Exception as error:
            if len(passes) == 1:
                return [Failure(error)]
            logger.warning("a pass of {} models failed ({!r}); each is tried alone", len(passes), error)
            return [output for one in passes for output in self._run([one])]

    def _take(self, queue: ModelQueue, running: RunningPass, output: PassOutput) -> None:
        if not running.order.replay:
            self.train_tokens[queue.tenant] += running.tokens
        running.outputs.append(output)
        if not running.done:
            return
        try:
            result = b"" if running.order.replay else running.result()
        except Exception as error:
            self._undo(running)
            self._failed(queue, error)
        else:
            self._pass_done(queue, running.order, result, seconds=running.seconds, changed=running.adds_gradient)

    def _undo(self, running: RunningPass) -> None:
        """Takes back what the parts that succeeded added."""
        if not running.outputs or not running.adds_gradient:
            return
        if len(running.parts) > 1:
            self._training.put_gradient(running.order.model_id, running.gradient_before)
        elif model := self._models.get(running.order.model_id):
            self._models.damage(model, "a request failed after its gradient was added")

    def _pass_done(
        self, queue: ModelQueue, order: Train, result: bytes = b"", *, seconds: float = 0.0, changed: bool
    ) -> None:
        if model := self._models.get(order.model_id):
            num_bytes = len(order.payload)
            self._models.done(model, order.seq, seconds=seconds, num_bytes=num_bytes, changed=changed)
        self._done(queue, result)

    # ---- reports

    def _done(self, queue: ModelQueue, result: bytes, size_bytes: int = 0) -> None:
        order = self._leave(queue)
        if not order.replay:
            self._send(Done(request_id=order.request_id, result=result, size_bytes=size_bytes))
        if (model := self._models.get(order.model_id)) and self._models.is_due(model):
            self._beside(self._models.write_snapshot(model))

    def _failed(self, queue: ModelQueue, error: BaseException) -> None:
        order, model = self._leave(queue), self._models.get(queue.model_id)
        text, category = _said(error)
        failed_before = isinstance(order, Optimize) and isinstance(error, ModelError)  # the only failures done again
        if order.replay and model and not failed_before:
            self._models.damage(model, f"what was done before a restart could not be done again: {text}")
        elif isinstance(order, CreateModel):
            self._models.forget(order.model_id)
        elif model and order.seq > model.seq:  # a step whose gradient was not finite has cleared it
            self._models.done(model, order.seq, seconds=0.0, changed=isinstance(order, Optimize))
        if not order.replay:
            self._send(Failed(request_id=order.request_id, error=text, category=category))

    def _leave(self, queue: ModelQueue) -> ModelOrder:
        """Takes the first order off its queue."""
        order = queue.orders[0]
        self._running.pop(queue.model_id, None)
        self._held.discard(queue.model_id)
        self._scheduler.finish(queue)
        return order


def _next_job(steps: Steps, outcome: Future[Any] | None) -> Job:
    if outcome is None:
        return next(steps)
    if error := outcome.exception():
        return steps.throw(error)
    return steps.send(outcome.result())


def _said(error: BaseException) -> tuple[str, str]:
    """What the one who asked is told, and whose fault it is."""
    if isinstance(error, ModelError):
        return str(error), error.category
    if isinstance(error, RequestError):
        return str(error), "user"
    logger.opt(exception=error).error("an order failed unexpectedly")
    return f"the server failed at this request ({type(error).__name__}); its log says more", "server"
