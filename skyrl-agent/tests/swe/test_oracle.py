"""The whole pipeline judged by an agent that knows the solutions and one that does nothing."""

import pytest

from .swe_oracle import idle, oracle_runner


async def solved_of(rows):
    """Ids of solved tasks, (with the solutions, without doing anything), of one run of both."""
    batch = [one for row in rows for one in (row, idle(row))]
    runner = oracle_runner(rows)
    groups = [group async for group in runner.groups(batch)]
    results = [result for group in groups for result in group.results]
    assert len(results) == len(batch)
    assert not [result.failure for result in results if result.failure is not None]
    by_id = {result.instance_id: result for result in results}
    for row in rows:
        still = by_id[f"{row['id']}-idle"]
        assert (still.reward, still.finish_reason) == (0.0, "no_git_patch")
        assert by_id[row["id"]].finish_reason == "FINISH_TOOL"
    return {result.instance_id for result in results if result.reward == 1.0}


async def test_oracle_solves_two_tasks(sandboxed, rows):
    tasks = [rows("swe/quixbugs")[0], rows("swe/exercism_python")[0]]
    assert await solved_of(tasks) == {row["id"] for row in tasks}


@pytest.mark.slow
async def test_oracle_solves_random_sample(sandboxed, rows):
    tasks = rows("swe/quixbugs")[3::12] + rows("swe/exercism_python")[5::40]
    assert len(tasks) == 8
    assert await solved_of(tasks) == {row["id"] for row in tasks}


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_oracle_solves_quixbugs_and_exercism(sandboxed, rows):
    quixbugs, exercism = rows("swe/quixbugs"), rows("swe/exercism_python")
    solved = await solved_of(quixbugs + exercism)
    assert {row["id"] for row in quixbugs} <= solved, "40 of 40"
    missing = {row["id"] for row in exercism} - solved
    assert len(exercism) - len(missing) >= 130, missing
