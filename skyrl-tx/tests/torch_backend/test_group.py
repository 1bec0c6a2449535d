"""Training over two real processes: equal to one process, reproducible, and independent of co-batched models."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file

from skyrl_train.orchestration.launcher import Ranks
from skyrl_train.orchestration.process_ranks import ProcessRanks
from skyrl_train.orchestration.ray_launcher import RayRanks
from skyrl_train.utils.ray_cluster import LOCAL_CLUSTER, build_worker_environment
from tx.errors import ModelError
from tx.tinker.backends.base import BackendLost, Failure, TrainingBackend
from tx.tinker.backends.torch.adapters import Adapter
from tx.tinker.backends.torch.files import read_into
from tx.tinker.backends.torch.group import GroupTraining, TrainingRanks
from tx.tinker.backends.torch.layout import micro_batches
from tx.tinker.backends.torch.rank_group import RankGroup
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.backends.torch.training_rank import TrainingRank
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]

ADAM = AdamParams(learning_rate=0.02, weight_decay=0.1)
LENGTHS = [9, 1, 33, 2, 40]


def start(kind: type[Ranks], folder: Path, logs: Path, **settings: object) -> tuple[GroupTraining, TrainingRanks, Any]:
    """Start two ranks. Returns: their group as backend, the calls to each of them, their processes."""
    processes = kind("training", TrainingRank, (str(folder), settings, 240), num_ranks=2, device="cpu", log_folder=logs)
    ranks = TrainingRanks(processes, device="cpu", timeout_seconds=240)
    return GroupTraining(ranks), ranks, processes


@pytest.fixture(scope="module")
def started(
    model_folder: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GroupTraining, TrainingRanks]]:
    logs = tmp_path_factory.mktemp("logs")
    group, ranks, _ = start(ProcessRanks, model_folder("qwen2"), logs, tokens_per_micro_batch=64)
    yield group, ranks
    group.close()


@pytest.fixture
def group(started: tuple[GroupTraining, TrainingRanks]) -> GroupTraining:
    return started[0]


def run(backend: TrainingBackend, model_id: str, data: list[Datum], loss: str = "cross_entropy") -> PassOutput:
    (result,) = backend.run([TrainingPass(model_id, data, loss)])
    if isinstance(result, Failure):
        raise result.error
    return result


def saved(backend: TrainingBackend, model_id: str, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    backend.save(model_id, folder, state=True)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_trains_as_one_process_does(backend: TrainingBackend, one: TrainingBackend, supervised: Supervised) -> None:
    passes = [TrainingPass(name, supervised(LENGTHS, i), "cross_entropy") for i, name in enumerate("ab")]
    passes.append(TrainingPass("c", supervised([5]), "cross_entropy"))
    for model in "abc":
        for each in (backend, one):
            each.create(model, LoraSpec(rank=4, seed=ord(model)))
    for _ in range(3):
        for ours, expected in zip(backend.run(passes), one.run(passes), strict=True):
            assert isinstance(ours, PassOutput) and isinstance(expected, PassOutput)
            assert ours.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-3)
            for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        for model in "abc":
            ours, expected = (each.optim_step(model, ADAM) for each in (backend, one))
            assert ours["grad_norm:mean"] > 0
            assert ours == pytest.approx(expected, rel=1e-4)
    for model in "abc":
        backend.forget(model)


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_train_like_single_process(
    group: GroupTraining, model_folder: Make, supervised: Supervised
) -> None:
    assert_trains_as_one_process_does(group, TorchTraining(model_folder("qwen2")), supervised)


@pytest.mark.slow
@pytest.mark.process
def test_training_is_reproducible_from_snapshot_and_on_every_process(
    started: tuple[GroupTraining, TrainingRanks], supervised: Supervised, tmp_path: Path
) -> None:
    group, ranks = started
    lora, data = LoraSpec(rank=8, seed=1), supervised(LENGTHS)
    folders = []
    for name in ("first", "second"):
        group.create(name, lora)
        for _ in range(2):
            run(group, name, data)
            group.optim_step(name, ADAM)
        run(group, name, data)
        folders.append(saved(group, name, tmp_path / name))
    assert folders[0] == folders[1] and "optimizer.safetensors" in folders[0]

    group.forget("second")
    group.restore("second", lora, tmp_path / "first")
    ends = []
    for name in ("first", "second"):
        of_ranks = ranks.call("optim_step", name, ADAM)
        assert of_ranks[0] == of_ranks[1]  # gradients of the same norm on both
        ends.append(saved(group, name, tmp_path / f"{name} at the end"))
        group.forget(name)
    assert ends[0] == ends[1] != folders[0]


@pytest.mark.slow
@pytest.mark.process
def test_state_moves_between_process_counts_with_same_steps(
    group: GroupTraining, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    lora, one = LoraSpec(rank=5, seed=1), TorchTraining(model_folder("qwen2"))
    one.create("m", lora)
    for _ in range(2):
        run(one, "m", supervised(LENGTHS))
        one.optim_step("m", ADAM)
    run(one, "m", supervised(LENGTHS))
    before = saved(one, "m", tmp_path / "one")
    group.restore("m", lora, tmp_path / "one")
    assert saved(group, "m", tmp_path / "two") == before
    clipping = AdamParams(learning_rate=0.02, weight_decay=0.1, grad_clip_norm=0.1)
    ours, expected = (each.optim_step("m", clipping) for each in (group, one))
    assert ours["grad_norm:mean"] > 0.1 and ours == pytest.approx(expected, rel=1e-12)
    after = saved(group, "m", tmp_path / "two after")
    assert after != before
    for each in (group, one):
        each.save("m", tmp_path / f"step of {type(each).__name__}", state=True)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        found, wanted = (load_file(tmp_path / f"step of {kind}" / name) for kind in ("GroupTraining", "TorchTraining"))
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[key], wanted[key], rtol=1e-6, atol=1e-9) for key in wanted)
    one.restore("m", lora, tmp_path / "two after")
    assert saved(one, "m", tmp_path / "one again") == after
    group.forget("m")


def test_ranks_shard_adapter_completely(model_folder: Make, supervised: Supervised, tmp_path: Path) -> None:
    lora, one = LoraSpec(rank=5, seed=1), TorchTraining(model_folder("qwen2"))
    one.create("m", lora)
    whole = one.adapters["m"]
    new = [Adapter(lora, whole.sites, torch.device("cpu"), torch.float32, RankGroup(rank, 3)) for rank in range(3)]
    for part in new:
        part.initialize()
    run(one, "m", supervised(LENGTHS))
    one.optim_step("m", ADAM)
    run(one, "m", supervised(LENGTHS))
    one.save("m", tmp_path, state=True)
    read = [Adapter(lora, whole.sites, torch.device("cpu"), torch.float32, RankGroup(rank, 3)) for rank in range(3)]
    for part in read:
        read_into(part, tmp_path, optimizer=True, gradient=True)
    one.create("new", lora)
    for adapter, parts in ((one.adapters["new"], new), (whole, read)):
        for kind, vector in adapter.vectors(state=True).items():
            held = [part.vectors(state=True)[kind] for part in parts]
            assert adapter.num_weights % 3 and all(3 * len(each) < len(vector) + 3 for each in held)
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in held)  # no view of the whole
            assert torch.equal(torch.cat(held)[: len(vector)], vector) and not torch.cat(held)[len(vector) :].any()


@pytest.mark.process
def test_co_batched_models_change_no_bit_and_errors_stay_per_model(
    group: GroupTraining, supervised: Supervised, tmp_path: Path
) -> None:
    wrong = supervised([3, 50, 4], 7)
    del wrong[2].inputs["weights"]
    wrong[2].inputs["advantages"] = np.ones(4, np.float32)
    nan = supervised([30, 30], 8)
    nan[1].inputs["weights"][:] = np.nan
    others = {"wrong": wrong, "nan": nan, "small": supervised([2], 9), "long": supervised([20, 90, 7], 10)}
    for name in (*others, "alone", "together"):
        group.create(name, LoraSpec(rank=4, seed=5))
    data = supervised(LENGTHS)
    company = [TrainingPass(name, each, "cross_entropy") for name, each in others.items()]
    for _ in range(2):
        alone = run(group, "alone", data)
        results = group.run([*company[:2], TrainingPass("together", data, "cross_entropy"), *company[2:]])
        together, failed = results.pop(2), results[0]
        assert isinstance(together, PassOutput) and repr(together.metrics) == repr(alone.metrics)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(together.logprobs, alone.logprobs, strict=True))
        assert isinstance(failed, Failure) and isinstance(failed.error, ModelError)
        assert "loss_fn_inputs['advantages']" in str(failed.error)
        assert all(isinstance(result, PassOutput) for result in results[1:])
        for name in ("alone", "together"):
            if name == "together":
                with pytest.raises(ModelError, match="learning_rate"):  # changes no bit either
                    group.optim_step(name, AdamParams(learning_rate=1e30))
            group.optim_step(name, ADAM)
    a, b = (saved(group, name, tmp_path / name) for name in ("alone", "together"))
    assert a == b
    assert group.optim_step("wrong", ADAM)["step:max"] == 0  # nothing was accumulated
    with pytest.raises(ModelError, match="not finite"):
        group.optim_step("nan", ADAM)
    for name in (*others, "alone", "together"):
        group.forget(name)


@pytest.mark.process
def test_invalid_datum_is_named_by_index_in_request(group: GroupTraining, supervised: Supervised) -> None:
    group.create("m", LoraSpec(rank=2))
    data = [Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"]}) for datum in supervised([30, 30, 5])]
    for datum in data[:2]:
        datum.inputs.update({name: np.ones(30, np.float32) for name in ("logprobs", "advantages")})
    with pytest.raises(ModelError, match=r"data\[2\]\.loss_fn_inputs"):
        run(group, "m", data, "importance_sampling")
    group.forget("m")
    with pytest.raises(ModelError, match="not loaded"):
        group.optim_step("m", ADAM)


@pytest.mark.process
def test_gradient_is_restored(group: GroupTraining, supervised: Supervised, tmp_path: Path) -> None:
    group.create("m", LoraSpec(rank=2))
    run(group, "m", supervised(LENGTHS))
    before = saved(group, "m", tmp_path / "before")
    group.copy_gradient("m")
    for batch in group.micro_batches(supervised(LENGTHS * 3, 1)):
        run(group, "m", batch)
    assert saved(group, "m", tmp_path / "between") != before
    group.put_gradient("m", None)
    assert saved(group, "m", tmp_path / "after") == before
    group.forget("m")


@pytest.mark.slow
def test_crashed_process_is_named_and_ends_others(model_folder: Make, supervised: Supervised, tmp_path: Path) -> None:
    """The model is a mixture of experts, with recomputed activations."""
    folder = model_folder("qwen3_moe")
    group, _, ranks = start(ProcessRanks, folder, tmp_path, gradient_checkpointing=True)
    for rank in range(2):
        (held,) = re.findall(
            r"holds ([\d,]+) of ([\d,]+) model parameters", (tmp_path / f"training_{rank}.log").read_text()
        )
        part, whole = (int(number.replace(",", "")) for number in held)
        assert part < 0.7 * whole
    ours = [psutil.Process(pid) for pid in ranks.pids()]
    for process in ours:
        process.terminate()  # as when the engine's whole session is asked to stop: the engine still has things to save
    assert_trains_as_one_process_does(group, TorchTraining(folder), supervised)
    os.kill(ours[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(BackendLost, match=r"training worker 1 .*signal 9"):
        for _ in range(3):
            group.create("m", LoraSpec(rank=2))
            run(group, "m", supervised([20, 20]))
    group.close()
    assert time.monotonic() - started < 30
    assert not any(process.is_running() for process in ours)


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    """Start a Ray cluster on this machine, or use the one that other tests of this process have started."""
    if ray.is_initialized():
        yield
        return
    os.environ.update(LOCAL_CLUSTER, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": build_worker_environment()},
        object_store_memory=256 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.mark.full
def test_ray_processes_match_plain_processes(
    ray_cluster: None, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    group, _, ranks = start(RayRanks, folder, tmp_path, chunk_size=32)
    assert_trains_as_one_process_does(group, TorchTraining(folder), supervised)
    group.create("m", LoraSpec(rank=2))
    with pytest.raises(ModelError, match="target_tokens"):
        run(group, "m", [Datum(np.zeros(3, np.int64), {})])
    os.kill(ranks.pids()[1], signal.SIGKILL)
    with pytest.raises(BackendLost, match="training worker 1"):
        run(group, "m", supervised([20, 20]))
    group.close()


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "dtype"), [("qwen2", "float32"), ("qwen3_moe", "bfloat16")])
def test_processes_reading_shards_match_whole_model_bit_for_bit(
    model_folder: Make, supervised: Supervised, tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Pickled weights cannot be read in parts: rank 0 loads all of them for the other."""
    parts, pickled = model_folder(architecture), tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(parts / "config.json", pickled)
    torch.save(load_file(parts / "model.safetensors"), pickled / "pytorch_model.bin")
    results, logs = [], []
    for folder in (parts, pickled):
        logs.append(tmp_path / f"logs of {folder.name}")
        group, _, _ = start(ProcessRanks, folder, logs[-1], dtype=dtype)
        group.create("m", LoraSpec(rank=4, seed=1))
        results.append((run(group, "m", supervised(LENGTHS)), group.optim_step("m", ADAM)))
        group.close()
    (ours, step), (expected, expected_step) = results
    assert step == expected_step
    assert all(np.array_equal(a, b) for a, b in zip(ours.logprobs, expected.logprobs, strict=True))
    warned = ["rank 0 loads all weights" in "".join(path.read_text() for path in folder.iterdir()) for folder in logs]
    assert warned == [False, True]


def test_data_are_divided_evenly_in_consecutive_runs() -> None:
    draw = np.random.default_rng(0)
    firsts = set()
    for _ in range(200):
        data = [Datum(draw.integers(99, size=draw.integers(1, 90)), {}) for _ in range(draw.integers(1, 12))]
        owners = RankGroup(size=3).assign_owners(data)
        turns = [a for a, b in zip(owners, [*owners[1:], -1], strict=True) if a != b]
        assert len(turns) <= 3 and all((b - a) % 3 == 1 for a, b in pairwise(turns))
        lengths = [len(datum.tokens) for datum in data]
        tokens = np.bincount(owners, lengths, 3)
        assert tokens.max() <= sum(lengths) / 3 + max(lengths)
        firsts.add(owners[0])
    assert firsts == {0, 1, 2}


def test_no_process_gets_more_tokens_than_single_process_limit() -> None:
    draw = np.random.default_rng(1)
    data = [Datum(draw.integers(99, size=draw.integers(1, 70)), {}) for _ in range(300)]
    batches = micro_batches(data, 64, 4)
    assert [datum for batch in batches for datum in batch] == data
    for batch in batches:
        lengths = [len(datum.tokens) for datum in batch]
        assert np.bincount(RankGroup(size=4).assign_owners(batch), lengths).max() <= max(64, *lengths)
    assert len(batches) <= len(micro_batches(data, 64)) / 4 + 1
