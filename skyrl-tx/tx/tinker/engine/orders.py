"""What each quick order (all but passes) does to a model. Knows nothing of whose turn it is, nor of threads: what takes
disks or networks long is yielded as a job, and the model's next order begins when the last one is through.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from tx.errors import ModelError
from tx.tinker.backends.base import TrainingBackend
from tx.tinker.engine.messages import CreateModel, Load, ModelOrder, Optimize, Save, Unload
from tx.tinker.engine.models import Model, Models, Steps
from tx.tinker.storage.folders import Folders


class Orders:
    """
    Args:
        training, models: what is changed
        folders: where checkpoints stand
        now: seconds
    """

    def __init__(
        self, training: TrainingBackend, models: Models, folders: Folders, now: Callable[[], float] = time.monotonic
    ):
        self._training, self._models, self._folders, self._now = training, models, folders, now

    def steps(self, model: Model, order: ModelOrder) -> Steps:
        """Carries an order out on a model that is in memory.

        Returns:
            its result as JSON, and the bytes that it wrote
        """
        started, answer, size, changed = self._now(), {}, 0, False
        match order:
            case CreateModel(folder=str(folder), optimizer=optimizer) | Load(folder=folder, optimizer=optimizer):
                yield from self._load(model, folder, optimizer=optimizer)
                changed = True
            case Optimize(adam=adam):
                answer = {"metrics": self._training.optim_step(model.model_id, adam)}
                changed = True
            case Save(folder=folder, state=state) if not order.replay:
                size = yield from self._save(model, folder, state=state)
            case Unload():
                self._models.forget(model.model_id)
        self._models.done(model, order.seq, seconds=self._now() - started, changed=changed)
        if isinstance(order, CreateModel | Load) and changed:
            yield from self._models.write_snapshot(model)  # the checkpoint may go, and could not be loaded again
        return json.dumps(answer).encode(), size

    def _load(self, model: Model, folder: str, *, optimizer: bool) -> Steps:
        try:
            local = yield partial(self._folders.local, folder)
            self._training.load(model.model_id, local, optimizer=optimizer)
        except FileNotFoundError:
            raise ModelError("the checkpoint is not there any more") from None

    def _save(self, model: Model, folder: str, *, state: bool) -> Steps:
        with ExitStack() as stack:
            local = stack.enter_context(self._folders.writing(folder))
            self._training.save(model.model_id, local, state=state)
            stand = stack.pop_all()
        yield stand.close
        return (yield partial(self._folders.size, folder))
