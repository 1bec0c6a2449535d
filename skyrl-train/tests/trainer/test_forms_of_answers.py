"""Forms that an answer takes between the engine and the objective, counted in a traced run."""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from skyrl_train.config.engine_kinds import EngineRegistry, EngineTraits, register_engine
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineInterface, InferenceEngineOutput
from skyrl_train.inference_engines.columns import to_output, to_requests
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.utils.run_folder import RunFolder

FORMS = {"Completion", "ResponseTokens", "TrainingSample", "TrainingInputBatch"}
"""Forms that hold token ids. The fifth, the micro-batch, is the rows of a batch that one forward computes."""

RECORDS = ("trajectory_rows.py", "run_folder.py", "certificate.py")
"""Files that write rows for people, which the objective does not read."""


def values_of(thing: Any) -> Iterator[Any]:
    """Yield the attributes or items of an object that belongs to this project."""
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif dataclasses.is_dataclass(thing):
        yield from (getattr(thing, field.name, None) for field in dataclasses.fields(thing))
    else:
        yield from getattr(thing, "__dict__", {}).values()


def holds(value: Any, tokens: list[int]) -> bool:
    """Check whether a value is a sequence or tensor of token ids, or a list of them, with these among them."""
    if isinstance(value, torch.Tensor):
        rows = value.tolist() if value.dim() == 2 and not value.is_floating_point() else []
    elif isinstance(value, list) and value:
        rows = value if isinstance(value[0], list) else [value]
    else:
        return False
    text = ",".join(map(str, tokens))
    return any(f",{text}," in f",{','.join(map(str, row))}," for row in rows if isinstance(row, Sequence))


def trace(run: Callable[[], object], tokens: list[int]) -> set[str]:
    """Return the names of the project's types whose instances hold these tokens when they are created or returned."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, returned: Any) -> None:
        file = frame.f_code.co_filename
        if event != "return" or "/skyrl_train/" not in file or file.endswith(RECORDS):
            return
        for thing in (returned, frame.f_locals.get("self")):
            kind = type(thing)
            values = [each for each in values_of(thing) if kind is not dict or isinstance(each, list)]  # columns
            is_ours = kind.__module__.startswith("skyrl_train.") and ".native." not in kind.__module__
            if (is_ours or kind is dict) and any(holds(each, tokens) for each in values):
                found.add(kind.__name__)

    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


class ColumnEngine(NativeInferenceEngine):
    """The native engine, behind the adapter for engines that answer in columns."""

    generate = InferenceEngineInterface.generate

    async def generate_batch(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        requests = to_requests(input_batch)
        return to_output([await NativeInferenceEngine.generate(self, request) for request in requests], {})


@pytest.fixture
def column_engine() -> Iterator[None]:
    register_engine("columns", requires=EngineTraits(is_in_process=True))(ColumnEngine)
    yield
    EngineRegistry.unregister("columns")


@pytest.mark.first_case
@pytest.mark.usefixtures("column_engine")
@pytest.mark.parametrize("backend, more", [("native", set()), ("columns", {"dict"})])
def test_response_has_five_representations_from_engine_to_objective(
    settings: Any, tmp_path: Path, backend: str, more: set[str]
) -> None:
    changes = {"trainer": {"max_training_steps": 1}, "generator": {"backend": backend}}
    BasePPOExp(settings(tmp_path / "first", changes)).run()
    [first, *_] = RunFolder(tmp_path / "first").read_trajectories(1, "train")
    found = trace(BasePPOExp(settings(tmp_path / "second", changes)).run, first["tokens"]["ids"])
    assert found == FORMS | more
