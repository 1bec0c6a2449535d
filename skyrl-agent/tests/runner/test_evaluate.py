"""`python -m skyrl_agent.evaluate`: what is finished is kept, what is cut off is no 0, the same command goes on."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from skyrl_agent.errors import BatchFailedError, ConfigError
from skyrl_agent.evaluate import Evaluation, collect_settings, main
from skyrl_agent.records import read_records
from skyrl_agent.testing import byte_tokenizer
from skyrl_agent.view import main as view
from skyrl_gym.waits import read_records as read_waits

from ..tools_general.agent_web_server import unused_url, web_server


@pytest.fixture
def evaluation(runner, tmp_path):
    """`evaluation(rows, settings)`: of one file."""

    def make(rows: list[dict[str, Any]], settings: dict[str, Any] | None = None, **changes: Any) -> Evaluation:
        path = tmp_path / "it.jsonl"
        return Evaluation(runner(output={"trajectories": str(path)}, **changes), rows, path, settings or {"a": 1})

    return make


async def test_resumed_evaluation_runs_only_missing_or_failed(evaluation):
    rows = [{"number": 1}, {"number": 2, "judge": "away"}]
    with evaluation(rows) as first:
        await first.run()
        assert str(first.summary()) == "2 of 4 trajectories are scored, 2 error_evaluation, 0 not started"
    rows = [{"number": 1}, {"number": 2}]
    with evaluation([*rows, {"number": 3}]) as second:
        await second.run()
        assert second.summary().is_complete
        assert second.summary().metrics["rollout_metrics/raw_reward"] == 1.0
        assert len(second.runner.infer_engine.requests) == 4, "those of the first instance are not played again"
    with evaluation(rows) as third:
        await third.run()
        assert (third.runner.infer_engine.requests, third.summary().num_scored) == ([], 4)


async def test_view_shows_last_attempt_of_each_trajectory(evaluation, capsys):
    for judge in ("away", "here"):
        with evaluation([{"number": 1, "judge": judge}]) as it, contextlib.suppress(BatchFailedError):
            await it.run()
    assert view([str(it.path)]) == 0
    assert "4 trajectories, mean reward 1 of 2; 2 error_evaluation, 2 FINISH" in capsys.readouterr().out
    assert view([str(it.path), "--last"]) == 0
    assert "2 trajectories, mean reward 1 of 2; 2 FINISH" in capsys.readouterr().out


async def test_truncated_trajectory_is_written_without_score(evaluation):
    rows = [{"number": 1}, {"number": 2, "seconds": 600}, {"number": 3}]
    limits = {"max_parallel_agents": 1, "order": "instances"}
    with evaluation(rows, dispatcher=limits) as first:
        run = asyncio.create_task(first.run())
        while len(first.results()) < 2:
            await asyncio.sleep(0.01)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        kinds = [(record["position"], record["finish_reason"], record["reward"]) for record in read_records(first.path)]
        assert kinds[:2] == [(0, "FINISH", 1.0)] * 2
        assert set(kinds[2:]) == {(1, "cancelled", None)}
        assert first.summary().num_scored == 2
        assert first.summary().metrics["rollout_metrics/raw_reward"] == 1.0
        assert str(first.summary()).endswith("not started")
    rows[1]["seconds"] = 0
    with evaluation(rows) as second:
        await second.run()
        assert second.summary().is_complete


def test_results_file_rejects_second_writer_and_other_settings(evaluation, tmp_path):
    with evaluation([{"number": 1}], {"a": 1}) as first:
        with pytest.raises(ConfigError, match="another evaluation is writing it"):
            evaluation([{"number": 1}], {"a": 1})
        asyncio.run(first.run())
    with pytest.raises(ConfigError, match=r"a is 2, but the trajectories in .*it.jsonl were made with 1"):
        evaluation([{"number": 1}], {"a": 2})
    (tmp_path / "it.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match="not from an evaluation"):
        evaluation([])


async def test_evaluation_stops_after_consecutive_failures(evaluation):
    rows = [{"number": number, "sandbox": "broken"} for number in range(5)] + [{"number": 5, "seconds": 600}]
    with evaluation(rows, dispatcher={"max_parallel_agents": 2, "order": "instances"}) as it:
        with pytest.raises(BatchFailedError, match="no sandbox"):
            await it.run()
        assert it.summary().num_scored == 0


def test_settings_include_inputs_of_trajectories(task_file, tmp_path):
    from skyrl_agent.config.task_file import load_task_file

    (tmp_path / "rows.jsonl").write_text("{}")

    def of(**changes: Any) -> dict[str, Any]:
        return collect_settings(load_task_file(task_file(**changes)), tmp_path / "rows.jsonl", "t")

    before = of()
    assert of(dispatcher={"max_parallel_agents": 3}, runtime={"kind": "local"}, output={"trajectories": "x"}) == before
    assert of(generator={"max_iterations": 3}) == before | {"generator.max_iterations": 3}
    (tmp_path / "rows.jsonl").write_text("{} ")
    assert of()["rows"] != before["rows"]


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """`command(url)`: arguments of an evaluation of two rows with that server."""

    def make(url: str) -> list[str]:
        content = {
            "task": "skyrl_agent.tasks.general_react.utils.GeneralReactTask",
            "tools": ["finish"],
            "generator": {"infer_backend": "openai_server", "backend_config": {"model_name": "m", "api_url": url}},
        }
        (tmp_path / "task.yaml").write_text(yaml.safe_dump(content))
        rows = [{"prompt": q, "reward_model": {"ground_truth": "a"}, "data_source": "nq"} for q in ("quick", "slow")]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
        files = [str(tmp_path / name) for name in ("task.yaml", "rows.jsonl", "tokenizer", "out.jsonl")]
        return [files[0], files[1], "--tokenizer", files[2], "--output", files[3]]

    return make


def test_command_without_server_exits_with_two(command, capsys, tmp_path):
    assert main(command(unused_url())) == 2
    assert "UnavailableError: generator.backend_config.api_url=" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_keeps_finished_and_unfinished_trajectories(command, tmp_path, capsys, number):
    is_slow, waits = True, set()

    def answer(asked: Any) -> Any:
        if asked.method == "GET":
            return 404, "no list"
        prompt = byte_tokenizer().decode(asked.body["prompt"], skip_special_tokens=False)
        if is_slow and "slow" in prompt:
            while not (tmp_path / "out.jsonl").exists():  # the quick one has ended
                if server.stopping.wait(0.02):
                    return "drop"
            [recorded] = read_waits(tmp_path / "waits")
            waits.update(
                {wait.who for wait in recorded.waits if wait.what == "the model's answer 1" and not wait.ended}
            )
            os.kill(process.pid, number)
            return "hang"
        text = "<function=finish>\n<parameter=answer>a</parameter>\n</function>"
        return 200, {"choices": [{"text": text, "finish_reason": "stop", "index": 0}], "usage": {}}

    with web_server(answer) as server:
        arguments = command(server.url)
        process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_agent.evaluate", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = process.communicate(timeout=240)
        assert process.returncode == 128 + number, err
        assert b"1 of 2 trajectories are scored, 1 cancelled, 0 not started" in out
        assert b"rollout_metrics/raw_reward: 1.000" in out
        assert waits == {"trajectory 1_0"}, "what `skyrl_train.explain` would have shown"
        cut_off = list(read_records(tmp_path / "out.jsonl"))[-1]
        assert (cut_off["finish_reason"], cut_off["reward"]) == ("cancelled", None)
        assert cut_off["failure"]["message"] == "the run was stopped before it ended"
        assert [message["role"] for message in cut_off["messages"]] == ["system", "user"]
        is_slow = False
        assert main(arguments) == 0
        assert "2 of 2 trajectories are scored, 0 not started" in capsys.readouterr().out


def test_unknown_tokenizer_names_option(command, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = command("http://127.0.0.1:9")
    arguments[arguments.index("--tokenizer") + 1] = "nobody/no-such-tokenizer"
    assert main(arguments) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_lossy_tokenizer_error_names_option(command, capsys, tmp_path):
    arguments = command("http://127.0.0.1:9")
    words = models.WordLevel({word: id for id, word in enumerate(["<end>", *"abcdefgh"])}, unk_token="<end>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "--tokenizer" in error and "loses text" in error
