"""Faults in each stage of the real pipeline: the batch always ends, says what happened, and leaves nothing behind."""

import asyncio
import os
import tempfile

import pytest

from skyrl_agent.finish import ERROR_AGENT, ERROR_EVALUATION, ERROR_RUNTIME, FINISH_TOOL
from skyrl_agent.runtimes.leases import FOLDER_VARIABLE
from skyrl_agent.training_rows import compute_trajectory_advantages

from ..runtimes.runtime_places import processes_with, wait_until_true
from ..tools_general.agent_web_server import web_server
from .swe_faults import HANG, PLANS, STAGES, faulty_runner, row

FIRST_PLAN, *OTHER_PLANS = PLANS
EVERY_PLAN = pytest.mark.parametrize(
    "plan", [FIRST_PLAN, *(pytest.param(plan, marks=pytest.mark.full) for plan in OTHER_PLANS)]
)
LATER = ERROR_RUNTIME, ERROR_RUNTIME, ERROR_EVALUATION
FATES = {
    "exception": (ERROR_AGENT, ERROR_AGENT, ERROR_EVALUATION),
    "hang": LATER,
    "slow tail": (FINISH_TOOL, FINISH_TOOL, FINISH_TOOL),
    "dead sandbox": LATER,
    "full disk": LATER,
    "dead engine": (None, ERROR_RUNTIME, None),
    "filled disk": (None, FINISH_TOOL, None),
}
"""Finish reason of the trajectory that meets the fault, by stage; None: the fault cannot occur there."""
CASES = [
    (stage, fault, reason)
    for fault, reasons in FATES.items()
    for stage, reason in zip(STAGES, reasons, strict=True)
    if reason is not None
]


@pytest.fixture(autouse=True)
def check_no_leftovers(sandboxed, tmp_path, monkeypatch):
    """No process, folder or lease, after each test."""
    places, leases = tmp_path / "places", tmp_path / "leases"
    places.mkdir()
    leases.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    monkeypatch.setenv(FOLDER_VARIABLE, str(leases))
    yield
    assert wait_until_true(lambda: not [*os.listdir(places), *os.listdir(leases), *processes_with(HANG)], 30)


@EVERY_PLAN
@pytest.mark.slow
async def test_fault_in_stage_ends_only_its_trajectory(plan):
    runner = faulty_runner(plan)
    batch = [row(), *(row(stage, fault) for stage, fault, _ in CASES)]
    groups = sorted([group async for group in runner.groups(batch)], key=lambda group: group.position)
    assert [len(group.results) for group in groups] == [3] * len(batch), "the batch completes"
    rows = runner.training_rows(groups)
    reasons = [["FINISH_TOOL"] * 3, *(sorted([reason, "FINISH_TOOL", "FINISH_TOOL"]) for _, _, reason in CASES)]
    assert [sorted(rows.finish_reasons[3 * n : 3 * n + 3]) for n in range(len(batch))] == reasons
    for number, (reason, failure) in enumerate(zip(rows.finish_reasons, rows.failures, strict=True)):
        fine = reason == FINISH_TOOL
        assert (failure is None) == fine
        assert rows.traj_rewards[number] == float(fine)
        assert rows.in_baseline[number] == fine
        masks = [mask for mask, owner in zip(rows.loss_masks, rows.row_trajectory, strict=True) if owner == number]
        assert any(map(any, masks)) == fine
        stage, fault, _ = CASES[number // 3 - 1]
        if failure is not None:
            assert failure.stage == stage, fault
            assert failure.kind == {"exception": "reward" if stage == "evaluate" else "environment"}.get(
                fault, "infrastructure"
            )
    assert compute_trajectory_advantages(rows) == [0.0] * len(rows.traj_rewards), "no failure is in a baseline"
    filled = groups[1 + [fault for _, fault, _ in CASES].index("filled disk")].results[0]
    assert "its files took more than" in filled.tool_calls[0].output


@EVERY_PLAN
async def test_transient_failure_is_retried(plan):
    runner = faulty_runner(plan, retries=2)
    rows = await runner.rows([row(stage, fault) for stage in STAGES for fault in ("short outage", "dead sandbox")])
    assert rows.finish_reasons == ["FINISH_TOOL"] * 18
    assert rows.traj_rewards == [1.0] * 18


@EVERY_PLAN
@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_run_leaves_nothing(plan, stage):
    runner = faulty_runner(plan)
    run = asyncio.create_task(runner.rows([row(), row(stage, "hang"), row()]))
    await asyncio.wait_for(runner.task.reached.wait(), 60)
    while not processes_with(HANG):
        await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, 60)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@EVERY_PLAN
async def test_stream_left_early_leaves_nothing(plan):
    runner = faulty_runner(plan)
    stream = runner.stream([row(), row("evaluate", "hang"), row("generate", "hang")])
    async for group in stream:
        assert group.position == 0
        break
    await asyncio.wait_for(stream.aclose(), 60)


@EVERY_PLAN
async def test_unavailable_server_ends_batch(plan):
    """The real backend, and a server that answered once."""
    from skyrl_agent.integrations.openai import OpenAIBackend

    runner = faulty_runner(plan)
    with web_server(lambda asked: (200, {"data": [{"id": "it"}]})) as server:
        runner.infer_engine = OpenAIBackend(
            infer_engine=None, tokenizer=runner.tokenizer, cfg={"model_name": "it", "api_url": server.url}
        )
        await runner.probe()
    rows = await runner.rows([row(), row()])
    assert rows.finish_reasons == ["error_runtime"] * 6
    assert not any(rows.in_baseline) and not any(map(any, rows.loss_masks))
