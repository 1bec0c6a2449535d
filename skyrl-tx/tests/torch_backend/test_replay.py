"""Orders of a model done again by the next engine, over the real backend: failed steps among them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.commands import CreateModel, Optimize, Save, Train
from tx.tinker.engine.messages import Done, Failed, Restore
from tx.tinker.engine.models import Models
from tx.tinker.engine.trainer import Trainer
from tx.tinker.storage.folders import Folders
from tx.tinker.types import AdamParams, Datum, LoraSpec
from tx.tinker.wire.codec import TrainingRequest, encode_training

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]

LORA = LoraSpec(rank=4, seed=3)
POSSIBLE = AdamParams(learning_rate=0.01, weight_decay=0.1)


def payload(data: list[Datum]) -> bytes:
    return encode_training(TrainingRequest("m", 0, data, "cross_entropy"))


class Engine:
    """A trainer over a backend of its own."""

    def __init__(self, model: Path, folder: Path):
        self.checkpoints, cache = Folders(str(folder / "checkpoints"), folder / "cache"), folder / "cache"
        backend = TorchTraining(model)
        models = Models(backend, Folders(str(folder / "snapshots"), cache), 8)
        self.reports: list[Any] = []
        self.trainer = Trainer(backend, models, self.checkpoints, self.reports.append)

    def carry_out(self, commands: list[Any], name: str) -> dict[str, bytes]:
        """Return the files of the model's checkpoint after the orders."""
        place = self.checkpoints.place(name)
        save = Save(request_id="save", tenant="t", model_id="m", seq=len(commands), folder=place, state=True)
        for command in [*commands, save]:
            self.trainer.inbox.put(command)
        while not any(isinstance(each, Done | Failed) and each.request_id == "save" for each in self.reports):
            self.trainer.step(1.0)
        self.trainer.close(0.0)
        return {path.name: path.read_bytes() for path in self.checkpoints.local(place).iterdir()}


def orders_with_failing_steps(supervised: Supervised, replay: bool) -> list[Any]:
    nan = supervised([7], 1)
    nan[0].inputs["weights"][2] = np.nan
    content: list[list[Datum] | AdamParams] = [
        supervised([5, 9]),
        POSSIBLE,
        nan,
        POSSIBLE,
        supervised([12], 2),
        AdamParams(learning_rate=1e30),
        AdamParams(weight_decay=1e30, learning_rate=0.1),
        supervised([3], 3),
        POSSIBLE,
    ]
    commands: list[Any] = [CreateModel(request_id="0", tenant="t", model_id="m", seq=0, lora=LORA, replay=replay)]
    for seq, each in enumerate(content, 1):
        common: dict[str, Any] = dict(request_id=str(seq), tenant="t", model_id="m", seq=seq, replay=replay)
        if isinstance(each, AdamParams):
            commands.append(Optimize(**common, adam=each))
        else:
            commands.append(Train(**common, payload=payload(each)))
    return commands


def test_replayed_failing_steps_leave_same_bits(model_folder: Make, supervised: Supervised, tmp_path: Path) -> None:
    first = Engine(model_folder("llama"), tmp_path)
    before = first.carry_out(orders_with_failing_steps(supervised, replay=False), "before")
    failed = {each.request_id: each for each in first.reports if isinstance(each, Failed)}
    assert set(failed) == {"4", "6", "7"}
    assert "the gradient was cleared" in failed["4"].error
    assert "adam_params.learning_rate" in failed["6"].error and "adam_params.weight_decay" in failed["7"].error
    assert all(each.category == "user" for each in failed.values()), "only these are done again"

    second = Engine(model_folder("llama"), tmp_path)
    second.trainer.inbox.put(Restore(model_id="m", tenant="t", lora=LORA, snapshot=None, seq=-1))
    after = second.carry_out(orders_with_failing_steps(supervised, replay=True), "after")
    assert [type(each) for each in second.reports if isinstance(each, Done | Failed)] == [Done], "in silence"
    assert after == before
