"""Groups are reported while other prompts of the same request are still sampled."""

import asyncio

from skyrl_train.generators.base import GeneratorInput, report_groups
from skyrl_train.rollouts.types import Trajectory, TrajectoryID


def test_group_is_reported_when_all_samples_succeeded():
    ids = [TrajectoryID(uid, number) for uid in "abc" for number in range(2)]
    generator_input = GeneratorInput(prompts=[[]] * 6, env_classes=[""] * 6, trajectory_ids=ids)
    reported: list[list[TrajectoryID]] = []

    async def run() -> None:
        ends = [asyncio.Event() for _ in ids]

        async def sample(index: int) -> Trajectory:
            await ends[index].wait()
            if index == 4:
                raise RuntimeError("my engine")
            return Trajectory(ids[index], [])

        tasks = [asyncio.create_task(sample(index)) for index in range(len(ids))]
        report_groups(tasks, generator_input, lambda own: reported.append([each.id for each in own]))
        for index, expected in [(3, 0), (0, 0), (2, 1), (4, 1), (5, 1), (1, 2)]:
            ends[index].set()
            await asyncio.wait([tasks[index]])
            await asyncio.sleep(0)
            assert len(reported) == expected

    asyncio.run(run())
    assert reported == [ids[2:4], ids[0:2]], "prompt c has a sample that failed"
