"""A run that lacks something says so before anything starts; a batch of failures alone is an error."""

import asyncio
import itertools
import time
from typing import Any

import pytest

from skyrl_agent.config.task_file import read_task
from skyrl_agent.errors import BatchFailedError, ConfigError, InfraError, UnavailableError
from skyrl_agent.runner import AgentRunner
from skyrl_agent.runtimes import RuntimeSpec, make_runtime, remote
from skyrl_agent.testing import byte_tokenizer

from ..tools_general.agent_web_server import unused_url, web_server

SWE = "skyrl_agent.tasks.local_swe.LocalSWETask"
REACT = "skyrl_agent.tasks.general_react.utils.GeneralReactTask"
SWE_ROW = {"files": {"a.py": ""}, "test_cmd": "python -m pytest -q"}
REACT_ROW = {"prompt": "q", "reward_model": {"ground_truth": "a"}, "data_source": "nq"}
MODELS = {"data": [{"id": "m"}]}


def models(asked: Any) -> Any:
    return 200, MODELS


def runner_of(url: str, task: str = REACT, **keys: Any) -> AgentRunner:
    """An agent with a server of the model."""
    generator = {"infer_backend": "openai_server", "backend_config": {"model_name": "m", "api_url": url}}
    tools = ["finish"] if task == REACT else ["bash", "finish"]
    return AgentRunner(read_task({"task": task, "tools": tools, "generator": generator} | keys), None, byte_tokenizer())


@pytest.mark.parametrize(
    "answer, text",
    [
        (None, "api_url=http://127.0.0.1"),
        ((401, "no"), "OPENAI_API_KEY"),
        ((200, {"data": [{"id": "other"}]}), "model_name"),
    ],
)
async def test_model_server_is_probed_before_anything_starts(answer, text, tmp_path):
    began = time.monotonic()
    output = {"trajectories": str(tmp_path / "it.jsonl")}
    with web_server(lambda asked: answer) as server:
        url = unused_url() if answer is None else server.url
        with pytest.raises(UnavailableError, match=text):
            await runner_of(url, output=output).run([REACT_ROW])
    assert time.monotonic() - began < 30
    assert not (tmp_path / "it.jsonl").exists()


@pytest.mark.parametrize("reply", [(404, "no list"), (200, "<html>"), (200, MODELS)])
async def test_server_without_model_list_passes_probe(reply):
    with web_server(lambda asked: reply) as server:
        await runner_of(server.url).probe()


async def test_probe_reports_all_missing_dependencies():
    tools = [{"local_search": {"url": f"{unused_url()}/retrieve"}}, "finish"]
    with pytest.raises(UnavailableError) as error:
        await runner_of(unused_url(), tools=tools).probe()
    assert "tools: local_search: http://127.0.0.1" in str(error.value)
    assert "generator.backend_config.api_url=http://127.0.0.1" in str(error.value)


@pytest.mark.parametrize("reply", [(404, "not here"), (200, {"hello": "world"}), (422, "no such field")])
async def test_wrong_retriever_path_is_detected_before_run(reply):
    with web_server(lambda asked: (200, MODELS) if asked.method == "GET" else reply) as server:
        agents = runner_of(server.url, tools=[{"local_search": {"url": f"{server.url}/wrong"}}, "finish"])
        with pytest.raises(UnavailableError, match="local_search"):
            await agents.probe()


async def test_judge_is_probed_when_task_uses_judge():
    with web_server(models) as server:
        agents = runner_of(server.url, task_config={"judge": {"model": "j", "base_url": unused_url()}})
        with pytest.raises(UnavailableError, match=r"task_config.judge: http://127.0.0.1"):
            await agents.probe()


RUNTIMES = {
    "nothing listens": ({"kind": "remote"}, None, r"runtime.url=.*: no server responds: ConnectError"),
    "another server": ({"kind": "remote"}, (404, "no"), r"runtime.url=.*not a runtime server"),
    "no token": ({"kind": "remote"}, (401, "no"), r"runtime.url=.*the server rejected.*runtime.token_env"),
}


@pytest.mark.parametrize("section, answer, text", RUNTIMES.values(), ids=RUNTIMES)
async def test_runtime_server_is_probed_before_anything_starts(section, answer, text):
    with web_server(models) as model, web_server(lambda asked: answer) as server:
        url = unused_url() if answer is None else server.url
        agents = runner_of(model.url, SWE, runtime=section | {"url": url})
        with pytest.raises(UnavailableError, match=text):
            await agents.probe(agents.instances([SWE_ROW]))


async def test_rows_are_checked_against_available_runtimes():
    answer = 200, {"max_runtimes": 4, "kind": "local"}
    with web_server(models) as model, web_server(lambda asked: answer) as server:
        agents = runner_of(model.url, SWE, runtime={"kind": "remote", "url": server.url})
        agents.task.runtime_spec = lambda instance: RuntimeSpec(**instance.row["runtime"])
        instances = agents.instances([SWE_ROW | {"runtime": {}}, SWE_ROW | {"runtime": {"image": "of/a-row"}}])
        with pytest.raises(UnavailableError, match="of/a-row"):
            await agents.probe(instances)
        instances = agents.instances([SWE_ROW | {"runtime": {}}, SWE_ROW | {"runtime": {"env": {"a.b": "c"}}}])
        with pytest.raises(UnavailableError, match=r"'a\.b'"):
            await agents.probe(instances)


async def test_docker_is_probed_before_anything_starts(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", unused_url().replace("http", "tcp"))
    with web_server(models) as model:
        agents = runner_of(model.url, SWE, runtime={"kind": "docker"})
        with pytest.raises(UnavailableError, match=r"runtime\.kind=docker"):
            await agents.probe(agents.instances([SWE_ROW]))


@pytest.mark.parametrize("answer", [None, (404, "not here"), (200, "<html>")])
async def test_runtime_with_wrong_url_fails_within_seconds(answer):
    began = time.monotonic()
    with web_server(lambda asked: answer) as server:
        runtime = make_runtime(RuntimeSpec(kind="remote", url=unused_url() if answer is None else server.url))
        with pytest.raises(InfraError, match=r"failed for 5 s; last: ConnectError|runtime server"):
            await runtime.start()
    assert time.monotonic() - began < 60


async def test_intermittently_failing_runtime_server_is_abandoned(monkeypatch):
    for name in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS", "CANCEL_SECONDS"):
        monkeypatch.setattr(remote, name, 0.05)
    monkeypatch.setattr(remote, "START_SECONDS", 1.0)
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.9)
    replies = itertools.cycle([(503, "no"), (503, {"kind": "full", "message": "no room"})])
    with web_server(lambda asked: next(replies)) as server:
        runtime = make_runtime(RuntimeSpec(kind="remote", url=server.url))
        async with asyncio.timeout(30):
            with pytest.raises(InfraError, match=r"the runtime server .* failed for"):
                await runtime.start()


@pytest.mark.parametrize(
    "keys, text",
    [
        ({"runtime": {"kind": "remote"}}, "runtime.url"),
        ({"runtime": {"kind": "remote", "url": "host:80"}}, "runtime.url"),
        ({"runtime": {"kind": "local", "url": "http://a"}}, "runtime.kind"),
        ({"runtime": {"token_env": "NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE"),
        ({"dispatcher": {"type": "async_pipelin"}}, "async_pipeline"),
        ({"dispatcher": {"num_environments": 2}}, "async_fix_pool"),
        ({"tools": ["bash", "finish"]}, "bash"),
        ({"generator": {"chat_template": "no_such.jinja"}}, "generator.chat_template"),
    ],
)
def test_task_file_is_checked_on_load(keys, text):
    with pytest.raises(ConfigError, match=text):
        runner_of("http://127.0.0.1:9", **keys)


async def test_config_error_in_stage_ends_run(runner, numbers):
    made = runner()

    async def wrong(**_: Any) -> Any:
        raise ConfigError("a setting that only the model knows")

    made.infer_engine.async_generate_ids = wrong
    with pytest.raises(ConfigError, match="only the model knows"):
        await made.run(numbers(1, 2))


async def test_fully_failed_batch_raises_most_common_cause(runner):
    rows = [{"number": 1, "sandbox": "broken"}, {"number": 2, "judge": "away"}, {"number": 3, "sandbox": "broken"}]
    text = r"all 6 trajectories failed, 4 of them with the cause: initialize: InfraError: no sandbox"
    with pytest.raises(BatchFailedError, match=text):
        await runner().run(rows)


async def test_metrics_of_failed_trajectories_are_omitted(runner):
    metrics = (await runner().rows([{"number": 1, "judge": "away"}])).rollout_metrics
    assert "rollout_metrics/raw_reward" not in metrics
    assert metrics["rollout_metrics/error_evaluation"] == 1.0
    assert "rollout_metrics/finish_ratio" not in (await runner().rows([])).rollout_metrics
