"""Measured peaks of processes, and what a run says when memory runs out: with real processes."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from skyrl_inspect.plan.memory_report import MemoryReport
from skyrl_inspect.plan.report import compare_peaks
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError, WorkerMemoryError
from skyrl_train.memory_plan.decisions import CHECKPOINTING, OFFLOAD, MemoryDecision
from skyrl_train.memory_plan.devices import find_device, get_processor
from skyrl_train.orchestration.process_ranks import ProcessRanks
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils.call_errors import build_failure
from skyrl_train.utils.memory_peaks import MemoryPeaks


def test_phase_peak_is_concurrent_memory():
    peaks = MemoryPeaks(torch.device("cpu"))
    with peaks.measure("large"):
        held = torch.ones(20_000_000)  # 80 MB
        del held
    with peaks.measure("small"):
        torch.ones(1000)
    taken = peaks.reset()
    assert 75e6 < taken["large"] < 90e6
    assert taken["small"] < 20e6  # the peak before does not count
    assert peaks.reset() == {}


def test_peak_excludes_malloc_cache_and_shared_memory():
    peaks = MemoryPeaks(torch.device("cpu"))
    try:
        torch.ones(1).share_memory_()
    except RuntimeError as error:
        pytest.skip(f"shared memory does not work here: {error}")
    blocks = [torch.ones(10_000) for _ in range(1500)]  # 60 MB in blocks that come from the heap
    last = torch.ones(10_000)  # above them, so that free does not shrink it
    del blocks
    with peaks.measure("train"):
        shared = torch.ones(20_000_000, dtype=torch.uint8).share_memory_()
        shared += 1
        own = torch.ones(5_000_000)  # 20 MB
    assert own.sum() + last.sum() > 0
    assert 15e6 < peaks.reset()["train"] < 45e6, "its own 20 MB, and those of `shared` before it was shared"


def test_peak_includes_phase_out_of_memory():
    peaks = MemoryPeaks(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="allocate"), peaks.measure("train"):
        held = torch.ones(20_000_000)
        torch.empty(1 << 60, dtype=torch.uint8)
    del held
    assert peaks.reset()["train"] > 75e6


def _torch_error() -> BaseException:
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "cause",
    [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory"), _torch_error()],
    ids=["python", "cuda", "cpu"],
)
def test_exhausted_memory_raises_worker_memory_error(cause: BaseException):
    assert isinstance(build_failure(cause, "policy worker 0", "no.log"), WorkerMemoryError)
    assert type(build_failure(RuntimeError("no"), "policy worker 0", "no.log")) is WorkerError


@pytest.mark.process
def test_killed_rank_is_suspected_of_memory(tmp_path: Path):
    async def run() -> None:
        ranks = ProcessRanks("policy", dict, (), num_ranks=1, log_folder=tmp_path)
        os.kill(ranks.pids()[0], signal.SIGKILL)
        try:
            await ranks.call([[("keys", ())]], 30.0, "a deadline")
        finally:
            ranks.kill()

    with pytest.raises(WorkerMemoryError, match="policy worker 0 died: ended by signal 9; the kernel kills"):
        asyncio.run(run())


class UnstartedRun(RayPPOTrainer):
    """Run with settings alone."""

    def __init__(self, cfg: SkyRLConfig):
        self.cfg = cfg


@pytest.fixture
def memory(tiny_model: str) -> MemoryReport:
    from skyrl_train.config.validation import validate_cfg

    cfg = SkyRLConfig.from_dict({
        "trainer": {
            "policy": {"model": {"path": tiny_model}}, "placement": {"device": "cpu"},
            "micro_train_batch_size_per_gpu": 8, "max_prompt_length": 32, "algorithm": {"use_kl_loss": False},
        },
        "generator": {"sampling_params": {"max_generate_length": 64}},
    })  # fmt: skip
    return MemoryReport(UnstartedRun(validate_cfg(cfg)))


def test_run_start_estimates_all_phases(memory: MemoryReport):
    text = memory.estimate()
    assert "train policy" in text and "generate" in text and "all processes of the machine" in text
    assert memory.plan is not None and memory.plan.device == get_processor()


def test_model_without_shape_is_no_error(memory: MemoryReport):
    memory._cfg.trainer.policy.model.path = "/no/such"
    assert memory.estimate() == "" and memory.plan is None


def test_measured_peaks_are_compared_with_estimates(memory: MemoryReport):
    memory.estimate()
    memory.decision = MemoryDecision({OFFLOAD: "keep"}, {OFFLOAD: "fits in 80 GB"})
    assert memory.plan is not None
    [*_, train] = memory.plan.workers["policy"]
    [peak] = compare_peaks(memory.plan, {"policy": {"train": int(train.total * 2)}})
    assert "train policy" in str(peak) and "(2.00 of it)" in str(peak) and peak.is_underestimated
    for part, is_above in ((1.14, False), (1.16, True), (0.5, False)):
        [peak] = compare_peaks(memory.plan, {"policy": {"train": int(train.total * part)}})
        assert peak.is_underestimated == is_above


class Ranks:
    """Policy with given peaks."""

    name = "policy"

    def __init__(self, *peaks: dict[str, int]):
        self.peaks = peaks

    async def call_all(self, _: object) -> list[dict[str, int]]:
        return list(self.peaks)


def test_gpu_metrics_name_estimate_and_warn_above_margin(memory: MemoryReport, monkeypatch: pytest.MonkeyPatch):
    memory.estimate()
    memory.decision = MemoryDecision({OFFLOAD: "keep"}, {OFFLOAD: "fits in 80 GB"})
    assert memory.plan is not None
    [*_, train] = memory.plan.workers["policy"]
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message)), level="WARNING")
    try:
        for device, size in (("cpu", 2 * train.total), ("h100-80", train.total), ("h100-80", 2 * train.total)):
            memory.plan = replace(memory.plan, device=find_device(device))
            monkeypatch.setattr(RayPPOTrainer, "groups", [Ranks({"train": int(size)}, {"train": 1})])
            metrics = asyncio.run(memory.measure())
            assert metrics["memory/policy_train_peak_gb"] == int(size) / 1e9
            assert ("memory/policy_train_estimate_gb" in metrics) == (device != "cpu")
            assert bool(warnings) == (device != "cpu" and size > train.total)
    finally:
        logger.remove(sink)
    assert "trainer.placement.offload" in warnings[0]


@pytest.mark.parametrize(
    ("chosen", "savings"),
    [
        ({}, []),
        ({OFFLOAD: "all", CHECKPOINTING: True}, []),
        ({OFFLOAD: "keep"}, ["trainer.placement.offload=all"]),
        (
            {OFFLOAD: "keep", CHECKPOINTING: False},
            ["trainer.placement.offload=all", "trainer.gradient_checkpointing=true"],
        ),
    ],
)
def test_memory_error_names_settings_that_free_memory(memory: MemoryReport, chosen: dict[str, Any], savings: list[str]):
    memory.estimate()
    memory.decision = MemoryDecision(chosen, dict.fromkeys(chosen, "fits in 80 GB"))
    advice = memory.format_advice()
    assert all(saving in advice for saving in savings) and ("more memory is free" in advice) == bool(savings)


def test_memory_error_has_estimates_peaks_and_change(memory: MemoryReport):
    memory.estimate()
    memory.measured = {"policy": {"train": 300_000_000}}
    error = WorkerMemoryError("policy worker 0 raised MemoryError")
    memory.on_error(error)
    [note] = error.__notes__
    assert "ESTIMATES" in note and "measured    0.300" in note
    assert note.splitlines()[-2].startswith("the smallest change") and "=" in note.splitlines()[-1]


def test_other_errors_are_left_alone(memory: MemoryReport):
    error = WorkerError("did not answer")
    memory.on_error(error)
    assert not hasattr(error, "__notes__")
