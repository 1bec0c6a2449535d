"""An engine's training thread over a backend one can compute by hand, driven by the test step by step."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tx.errors import ModelError
from tx.tinker.backends.base import BackendInfo, Failure, TrainingBackend
from tx.tinker.commands import CreateModel, Load, ModelCommand, Optimize, Save, Train, Unload
from tx.tinker.engine.messages import Done, Failed, FromEngine, Restore, Snapshotted
from tx.tinker.engine.models import Models
from tx.tinker.engine.trainer import Trainer
from tx.tinker.storage.folders import Folders
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass
from tx.tinker.wire.codec import TrainingRequest, decode_pass_output, encode_training

MICRO_BATCH_TOKENS = 100
USERS_FAULT, OUR_FAULT = 13, 14
"""Tokens: the first fails the data that has it, the second the whole pass."""


@dataclass
class Sum:
    """A model of one weight. The loss of a token t is -weight * t, so its gradient is -t."""

    weight: float
    gradient: float | None = None
    steps: int = 0


class Arithmetic(TrainingBackend):
    """Adds. A pass of n tokens takes n milliseconds of the test's clock, a save 100."""

    def __init__(self, clock: "Clock"):
        self.models: dict[str, Sum] = {}
        self.passes: list[list[str]] = []
        """Models in each pass."""
        self._clock = clock

    def info(self) -> BackendInfo:
        return BackendInfo(name="sum", vocab_size=100, max_context=1000, max_lora_rank=8)

    def create(self, model_id: str, lora: LoraSpec) -> None:
        if lora.rank > 8:
            raise ModelError("rank must be at most 8")
        self.models[model_id] = Sum(float(lora.seed))

    def forget(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    def micro_batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        batches, room = [], 0
        for datum in data:
            if len(datum.tokens) > room:
                batches.append([])
                room = MICRO_BATCH_TOKENS
            batches[-1].append(datum)
            room -= len(datum.tokens)
        return batches

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        if any(OUR_FAULT in datum.tokens for each in passes for datum in each.data):
            raise RuntimeError("a short circuit")
        self.passes.append([each.model_id for each in passes])
        return [self._run(each) for each in passes]

    def _run(self, each: TrainingPass) -> PassOutput | Failure:
        tokens = np.concatenate([datum.tokens for datum in each.data])
        self._clock.seconds += len(tokens) / 1000
        if USERS_FAULT in tokens:
            return Failure(ModelError("thirteen is no number"))
        model, total = self.models[each.model_id], float(tokens.sum())
        if not each.forward_only:
            model.gradient = (model.gradient or 0.0) - total
        logprobs = [(model.weight * datum.tokens).astype(np.float32) for datum in each.data]
        return PassOutput(logprobs, {"loss:sum": -model.weight * total})

    def copy_gradient(self, model_id: str) -> float | None:
        return self.models[model_id].gradient

    def put_gradient(self, model_id: str, gradient: float | None) -> None:
        self.models[model_id].gradient = gradient

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self.models[model_id]
        gradient, model.gradient = model.gradient or 0.0, None
        if gradient == -666:
            raise ModelError("the gradient is not finite")
        if adam.learning_rate < 0:
            raise ZeroDivisionError
        model.weight -= adam.learning_rate * gradient
        model.steps += 1
        return {"grad_norm:mean": abs(gradient)}

    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        self._clock.seconds += 0.1
        model = self.models[model_id]
        content = {"weight": model.weight} | ({"gradient": model.gradient, "steps": model.steps} if state else {})
        (folder / "sum.json").write_text(json.dumps(content))

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        content = json.loads((folder / "sum.json").read_text())
        self.models[model_id] = Sum(content["weight"], None, content["steps"] if optimizer else 0)

    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        self.models[model_id] = Sum(**json.loads((folder / "sum.json").read_text()))

    def close(self) -> None: ...


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


class Bench:
    """A trainer with its sent commands and received messages. Commands get seqs automatically."""

    def __init__(self, folder: Path, *, limit: int = 64, pass_tokens: int = 1000):
        self.clock = Clock()
        self.backend = Arithmetic(self.clock)
        self.said: list[FromEngine] = []
        self.checkpoints = Folders(str(folder / "checkpoints"), folder / "cache")
        self.models = Models(self.backend, Folders(str(folder / "snapshots"), folder / "cache"), limit, self.clock)
        self.trainer = Trainer(
            self.backend, self.models, self.checkpoints, self.said.append, pass_tokens=pass_tokens, now=self.clock
        )
        self._seqs: dict[str, count] = {}

    # ---- commands

    def _tell(self, kind: type[ModelCommand], model: str, **values: Any) -> str:
        seq = next(self._seqs.setdefault(model, count()))
        command = kind(request_id=f"{model}#{seq}", tenant=model[0], model_id=model, seq=seq, **values)
        self.trainer.inbox.put(command)
        return command.request_id

    def create(self, model: str, weight: int = 0, *, rank: int = 8, **values: Any) -> str:
        """The tenant is the first letter of the model's name."""
        return self._tell(CreateModel, model, lora=LoraSpec(rank=rank, seed=weight), **values)

    def train(self, model: str, *data: list[int], forward_only: bool = False, **values: Any) -> str:
        request = TrainingRequest(
            model, 0, [_datum(tokens) for tokens in data], "cross_entropy", forward_only=forward_only
        )
        return self._tell(Train, model, payload=encode_training(request), **values)

    def optimize(self, model: str, learning_rate: float = 1.0, **values: Any) -> str:
        return self._tell(Optimize, model, adam=AdamParams(learning_rate=learning_rate), **values)

    def save(self, model: str, name: str, *, state: bool = True, **values: Any) -> str:
        return self._tell(Save, model, folder=self.checkpoints.place(name), state=state, **values)

    def load(self, model: str, name: str, *, optimizer: bool = True, **values: Any) -> str:
        return self._tell(Load, model, folder=self.checkpoints.place(name), optimizer=optimizer, **values)

    def unload(self, model: str) -> str:
        return self._tell(Unload, model)

    def restore(self, model: str, snapshot: str | None, seq: int, weight: int = 0) -> None:
        lora = LoraSpec(rank=8, seed=weight)
        self.trainer.inbox.put(Restore(model_id=model, tenant=model[0], lora=lora, snapshot=snapshot, seq=seq))
        self._seqs[model] = count(seq + 1)

    def tell(self, story: str, **values: Any) -> list[str]:
        """Give commands such as `create a1 7, train a1 5 1x90, forward a1 3, optimize a1, save a1 name`, with 7 the
        weight, and data of one token 5 and of ninety tokens 1. Returns the request ids."""
        return [self._give(*command.split(), **values) for command in story.split(", ")]

    def _give(self, verb: str, model: str, *words: str, **values: Any) -> str:
        if verb in ("train", "forward"):
            data = [[int(token)] * int(times or 1) for token, _, times in (word.partition("x") for word in words)]
            return self.train(model, *data, forward_only=verb == "forward", **values)
        return getattr(self, verb)(model, *(int(word) if word.isdigit() else word for word in words), **values)

    def do(self, story: str, **values: Any) -> list[str]:
        asked = self.tell(story, **values)
        self.work()
        return asked

    # ---- what it does

    def work(self) -> None:
        """Run until nothing is left to do and all snapshots are on disk."""
        while self.trainer.step(0.0) or self.trainer.num_commands() or self.models.is_writing():
            pass

    def result(self, request_id: str) -> Any:
        """JSON, or a `PassOutput`; the error's text for what failed."""
        (said,) = [m for m in self.said if isinstance(m, Done | Failed) and m.request_id == request_id]
        if isinstance(said, Failed):
            return said.category, said.error
        return json.loads(said.result) if said.result[:1] == b"{" else decode_pass_output(said.result)

    @property
    def answered(self) -> list[str]:
        return [message.request_id for message in self.said if isinstance(message, Done | Failed)]

    @property
    def snapshots(self) -> list[Snapshotted]:
        return [message for message in self.said if isinstance(message, Snapshotted)]


def _datum(tokens: list[int]) -> Datum:
    array = np.array(tokens, np.int64)
    return Datum(array, {"target_tokens": array, "weights": np.ones(len(tokens), np.float32)})


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Benches over the same folders: one after the other is an engine and the next one."""
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(tmp_path, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.trainer.close(0.0)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
