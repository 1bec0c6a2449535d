"""Runner: from a task file and rows to groups of trajectories."""

import asyncio
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_agent import AutoAgentRunner
from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.tasks.base import Instance
from skyrl_agent.testing import byte_tokenizer
from skyrl_agent.types import TrajectoryResult


async def test_batch_keeps_order(runner, numbers):
    assert (await runner().run([]))["traj_rewards"] == []
    output = await runner().run(numbers(3, 40))
    assert output["traj_rewards"] == [1.0] * 4
    assert output["traj_idx"] == ["0-traj0", "0-traj1", "1-traj0", "1-traj1"]
    decode = byte_tokenizer().decode
    assert [decode(ids) for ids in output["response_ids"]] == ["6<|im_end|>"] * 2 + ["80<|im_end|>"] * 2
    assert [sum(mask) for mask in output["loss_masks"]] == [2, 2, 3, 3]
    assert output["rollout_metrics"]["rollout_metrics/finish_ratio"] == 1.0
    assert output["rollout_metrics"]["dispatcher/seconds"] > 0


async def test_instances_with_duplicate_id_keep_separate_results(runner):
    rows = [{"number": 1, "id": "same"}, {"number": 2, "id": "same"}, {"number": 3, "id": "same"}]
    made = runner(data={"instance_id_key": "id"}, generator={"num_trajectories": 1})
    rows_of = await made.rows(rows)
    assert rows_of.instance_ids == ["same"] * 3
    assert rows_of.groups == [0, 1, 2]
    assert [byte_tokenizer().decode(ids) for ids in rows_of.response_ids] == [f"{n}<|im_end|>" for n in (2, 4, 6)]


async def test_concurrent_batches_do_not_mix(runner, numbers):
    made = runner()
    outputs = await asyncio.gather(*(made.run(numbers(*range(n, n + 5))) for n in (10, 20, 30)))
    for start, output in zip((10, 20, 30), outputs, strict=True):
        texts = [byte_tokenizer().decode(ids) for ids in output["response_ids"]]
        assert texts == [f"{2 * n}<|im_end|>" for n in range(start, start + 5) for _ in range(2)]


async def test_failed_trajectory_is_excluded_from_group(runner):
    rows = [{"number": 1}, {"number": 2, "judge": "away"}, {"number": 3, "sandbox": "broken"}]
    found = await runner().rows(rows)
    assert found.finish_reasons == ["FINISH"] * 2 + ["error_evaluation"] * 2 + ["error_runtime"] * 2
    assert found.in_baseline == [True, True, False, False, False, False]
    assert [sum(mask) > 0 for mask in found.loss_masks] == [True, True, False, False, False, False]
    assert [len(ids) for ids in found.response_ids] == [2, 2, 2, 2, 1, 1], "tokens are kept where there are any"
    assert [failure and failure.message for failure in found.failures][2] == "InfraError: the judge is away"
    assert found.rollout_metrics["rollout_metrics/raw_reward"] == 1.0


async def test_groups_are_yielded_as_they_complete(runner):
    rows = [{"number": 1, "seconds": 0.3}, {"number": 2}, {"number": 3, "seconds": 0.1}]
    groups = [group async for group in runner().stream(rows)]
    assert [group.position for group in groups] == [1, 2, 0]
    assert [[result.trajectory_id for result in group.results] for group in groups] == [[0, 1]] * 3


async def test_leaving_stream_early_stops_all_trajectories(runner):
    rows = [{"number": 1}, {"number": 2, "seconds": 60}]
    stream = runner().stream(rows)
    async for group in stream:
        assert group.position == 0
        break
    await stream.aclose()  # and nothing is left, says the fixture


async def test_cancelled_run_ends(runner):
    task = asyncio.create_task(runner().run([{"number": 1, "seconds": 60}]))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_evaluation_overrides_sampling_and_trajectory_count(runner, numbers):
    made = runner(
        generator={
            "sampling_params": {"temperature": 1.0, "top_p": 0.9},
            "val_config": {"num_trajectories": 1, "sampling_params": {"temperature": 0.0}},
        }
    )
    output = await made.run(numbers(5), val_mode=True)
    assert output["traj_rewards"] == [1.0]
    assert made.infer_engine.requests[0].sampling_params == {"temperature": 0.0, "top_p": 0.9}


async def test_trajectory_seeds_are_distinct_and_reproducible(runner, numbers):
    made = runner()
    for _ in range(2):
        await made.rows(numbers(1, 2), sampling_params={"seed": 7})
    seeds = [request.sampling_params["seed"] for request in made.infer_engine.requests]
    assert len(set(seeds)) == 4
    assert sorted(seeds[:4]) == sorted(seeds[4:])


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"agent_cls": "runner_cases.OneQuestionsAgent"}, "did you mean runner_cases.OneQuestionAgent"),
        ({"agent_cls": "skyrl_agent.agents.react.ReactAgent"}, "did you mean skyrl_agent.agents.react.ReActAgent"),
        ({"task": "runner_cases.Tripling"}, "task='runner_cases.Tripling' must be the dotted path of a class"),
        ({"task": ".runner_cases.Tripled"}, "task='.runner_cases.Tripled' must be the dotted path of a class"),
        ({"task": "no_such_module.Task"}, "cannot import no_such_module"),
        ({"task": "runner_cases.OneQuestionAgent"}, "must be a subclass of skyrl_agent.tasks.base.BaseTask"),
        ({"task_config": {"wrong": 2}}, "unexpected keyword argument 'wrong'"),
        ({"generator": {"infer_backend": "skyrl-trian"}}, "did you mean skyrl-train"),
        ({"generator": {"infer_backend": "openai_server"}}, "generator.backend_config.model_name"),
        ({"generator": {"infer_backend": "tinker"}}, "needs tinker, which is not installed"),
        (
            {"generator": {"infer_backend": "skyrl-train", "backend_config": {"a": 1}}},
            "unknown key generator.backend_config.a",
        ),
        ({"generator": {"num_trajectory": 1}}, "did you mean generator.num_trajectories"),
        ({"agent_config": {"a": 1}}, "OneQuestion takes none"),
    ],
)
def test_invalid_task_file_is_rejected_before_start(runner, changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as error:
        runner(**changes)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "data, row, text",
    [
        ({}, {"letter": "a"}, "row of instance 1 has no field 'number'"),
        ({"instance_id_key": "meta.id"}, {"number": 1}, "row 0 of the batch: data.instance_id_key='meta.id'"),
        ({"data_source_key": "source"}, {"number": 1}, "data.data_source_key='source'"),
        ({}, "number", "row 1 of the batch must be a mapping of fields; got str"),
    ],
)
async def test_invalid_row_is_rejected_before_start(runner, data: dict, row: Any, text: str):
    made = runner(data=data)
    with pytest.raises(TaskRowError) as error:
        await made.run([{"number": 1}, row])
    assert text in str(error.value)
    assert not made.infer_engine.requests


def test_missing_task_file_raises_file_not_found():
    with pytest.raises(FileNotFoundError):
        AutoAgentRunner.from_task("no_such_file.yaml", None, None)


def test_published_names_are_importable():
    from skyrl_agent.agents import AGENT_GENERATOR_REGISTRY, AgentRunner  # type: ignore[attr-defined]
    from skyrl_agent.agents.base import AgentRunner as same  # type: ignore[attr-defined]
    from skyrl_agent.config.configuration_utils import TrajectoryConfig, get_field_from_config

    assert AgentRunner is same
    assert "skyrl_agent.agents.oh_codeact.OHCodeActAgent" in AGENT_GENERATOR_REGISTRY
    assert TrajectoryConfig(instance_id="a", trajectory_id=1).max_prompt_length == 1024
    assert get_field_from_config("a.b", {"a": {"b": 3}}) == 3
    with pytest.raises(ValueError, match="'c'"):
        get_field_from_config("a.c", {"a": {"b": 3}})


def test_batches_of_runner_share_training_or_evaluation_limits(runner):
    made = runner()
    first, second, evaluation = (made._dispatch(val_mode) for val_mode in (False, False, True))
    assert first.capacity is second.capacity
    assert evaluation.capacity is not first.capacity


def test_missing_field_of_row_is_named():
    instance = Instance({"question": "2 + 3"}, "7")
    assert instance.row["question"] == "2 + 3" and instance.row.get("answer") is None
    for row in (instance.row, copy.deepcopy(instance.row), pickle.loads(pickle.dumps(instance.row))):
        with pytest.raises(TaskRowError, match="row 7 has no field 'answer'"):
            row["answer"]


async def test_custom_task_of_documentation_works():
    page = Path(__file__).parents[3] / "docs" / "agents.md"
    names: dict[str, Any] = {}
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "SumTask" in block]
    exec(code, names)
    task, instance = names["SumTask"](), Instance({"question": "2 + 3", "answer": 5}, "0")
    task.check_row(instance)
    ended = TrajectoryResult(finish_reason="FINISH_TOOL")
    assert [await task.evaluate_result(text, instance, ended) for text in (" 5", "6", None)] == [1.0, 0.0, 0.0]
    with pytest.raises(TaskRowError, match="'answer'"):
        task.check_row(Instance({"question": "2 + 3"}, "1"))
