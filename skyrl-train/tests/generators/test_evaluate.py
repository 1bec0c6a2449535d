"""Scores by data source, and the files with what was evaluated."""

import json
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import AllRolloutsFailedError
from skyrl_train.evaluate import evaluate, sanitize_data_source
from skyrl_train.generators.base import Failure, GeneratorInterface, GeneratorOutput
from skyrl_train.utils.run_folder import RunFolder


class Grader(GeneratorInterface):
    """Generator that answers every prompt with `k`; the reward of sample k is given by the row."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.inputs = []

    async def generate(self, input_batch: Any) -> GeneratorOutput:
        self.inputs.append(input_batch)
        repetitions = [trajectory.repetition_id for trajectory in input_batch["trajectory_ids"]]
        worth = [extras["worth"][k] for extras, k in zip(input_batch["env_extras"], repetitions, strict=True)]
        n = len(worth)
        return GeneratorOutput(
            prompt_token_ids=[self.tokenizer.encode("Q")] * n,
            response_ids=[self.tokenizer.encode(str(k)) for k in repetitions],
            rewards=[[w or 0.0] for w in worth],
            loss_masks=[[1]] * n,
            stop_reasons=["stop" if w is not None else "error" for w in worth],
            rollout_metrics={"environment/turns": 1.0},
            rollout_logprobs=None,
            failures=[None if w is not None else Failure("tool", "gone") for w in worth],
        )


def rows(*sources_and_worth):
    return [
        {"prompt": [], "env_class": None, "env_extras": {"data_source": source, "worth": worth}, "uid": str(i)}
        for i, (source, worth) in enumerate(sources_and_worth)
    ]


@pytest.fixture
def config(tmp_path, tmp_path_factory):
    config = SkyRLConfig()
    config.generator.eval_n_samples_per_prompt = 2
    config.trainer.export_path = str(tmp_path)
    config.trainer.run_dir = str(tmp_path_factory.mktemp("run"))
    return config


async def test_failed_source_has_no_score_and_failed_set_raises(characters, config, tmp_path):
    batch = rows(("math", [1.0, 0.0]), ("code", [None, None]))
    metrics = await evaluate([batch], Grader(characters), config, global_step=3, tokenizer=characters)
    assert (metrics["eval/code/avg_score"], metrics["eval/code/pass_at_2"]) == (None, None)
    assert metrics["eval/all/avg_score"] == 0.5
    failing = [rows(("code", [None, None])), rows(("code", [None, None]))]
    failing[1][0]["uid"] = "1"
    with pytest.raises(AllRolloutsFailedError, match="tool: gone"):
        await evaluate(failing, Grader(characters), config, global_step=4, tokenizer=characters)
    assert (tmp_path / "dumped_evals" / "global_step_4_evals" / "code.jsonl").exists()


async def test_data_sources_with_similar_names_are_separate(characters, config, tmp_path):
    worths = {"lab/set": 1.0, "lab_set": 0.0, "all": 0.25, "aggregated_results": 0.5, "s" * 300: 0.75}
    batches = [rows((source, [worth, worth])) for source, worth in worths.items()]
    for number, batch in enumerate(batches):
        batch[0]["uid"] = str(number)
    metrics = await evaluate(batches, Grader(characters), config, global_step=3, tokenizer=characters)
    names = [sanitize_data_source(source) for source in worths]
    assert [metrics[f"eval/{name}/avg_score"] for name in names] == list(worths.values())
    assert metrics["eval/all/avg_score"] == 0.5
    files = {path.name for path in (tmp_path / "dumped_evals" / "global_step_3_evals").iterdir()}
    assert files == {f"{name}.jsonl" for name in names} | {"aggregated_results.jsonl"} and len(files) == 6


async def test_scores_are_reported_by_data_source_and_overall(characters, config, tmp_path):
    batches = [rows(("org/math", [1.0, 0.0]), ("org/math", [0.0, 0.0])), rows((None, [None, -1.0]))]
    batches[1][0]["uid"] = "2"
    generator = Grader(characters)
    metrics = await evaluate(batches, generator, config, global_step=3, tokenizer=characters)
    expected = {
        "eval/org_math/avg_score": 0.25,
        "eval/org_math/pass_at_2": 0.5,
        "eval/org_math/mean_positive_reward": 0.25,
        "eval/unknown/avg_score": -1.0,  # the failed sample does not count
        "eval/unknown/pass_at_2": 0.0,
        "eval/unknown/mean_positive_reward": 0.0,
        "eval/all/avg_score": 0.0,
        "eval/all/pass_at_2": pytest.approx(1 / 3),
        "eval/all/environment/turns": 1.0,
        "eval/all/generate/avg_num_tokens": 1.0,
        "eval/all/generate/num_failed/tool": 1.0,
    }
    assert {key: metrics[key] for key in expected} == expected
    assert generator.inputs[0]["sampling_params"]["temperature"] == 0.0
    assert generator.inputs[0]["batch_metadata"].training_phase == "eval"
    folder = tmp_path / "dumped_evals" / "global_step_3_evals"
    assert sorted(path.name for path in folder.iterdir()) == [
        "aggregated_results.jsonl", "org_math.jsonl", "unknown.jsonl",
    ]  # fmt: skip
    first = json.loads((folder / "org_math.jsonl").read_text().splitlines()[0])
    assert (first["input_prompt"], first["output_response"], first["score"], first["stop_reason"]) == (
        "Q",
        "0",
        1.0,
        "stop",
    )
    assert (first["env_class"], first["data_source"], first["failure"]) == ("gsm8k", "org/math", None)
    assert json.loads((folder / "unknown.jsonl").read_text().splitlines()[0])["failure"] == "tool: gone"
    assert json.loads((folder / "aggregated_results.jsonl").read_text()) == metrics


async def test_standalone_evaluation_has_separate_folder(characters, config, tmp_path):
    await evaluate([rows(("a", [1.0, 1.0]))], Grader(characters), config, global_step=None, tokenizer=characters)
    assert (tmp_path / "dumped_evals" / "eval_only" / "a.jsonl").is_file()


async def test_dump_can_be_disabled(characters, config, tmp_path):
    config.trainer.dump_eval_results = False
    await evaluate([rows(("a", [1.0, 1.0]))], Grader(characters), config, global_step=1, tokenizer=characters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("merged", [False, True], ids=["turns", "joined"])
async def test_step_wise_turns_keep_evaluation_scores(characters, config, game, say, tmp_path, merged):
    """Three prompts of one, two and three turns; the last loses more in its second turn than it gains elsewhere."""

    class Scripted(GeneratorInterface):
        def __init__(self, settings) -> None:
            self.settings = {"max_turns": 4, "max_input_length": 10_000} | settings

        async def generate(self, input_batch: Any) -> GeneratorOutput:
            extras = input_batch["env_extras"]
            answers = [[say(f"answer {k}") for k in range(len(row["steps"]))] for row in extras]
            output = (await game(characters, answers, extras, settings=self.settings).play()).output
            if output.get("is_last_step") is None:
                output["trajectory_ids"] = input_batch["trajectory_ids"]
            else:
                names = dict(enumerate(input_batch["trajectory_ids"]))
                output["trajectory_ids"] = [names[int(i.instance_id)] for i in output["trajectory_ids"] or []]
            return output

    config.generator.eval_n_samples_per_prompt = 1
    config.generator.max_turns, config.generator.max_input_length = 4, 10_000
    config.trainer.run_dir = str(tmp_path / "run")
    config.trainer.dump_trajectories = True
    rewards = ([1.0], [0.0, 0.25], [0.5, -2.0, 0.5])
    batch = [
        {
            "prompt": [],
            "env_class": None,
            "env_extras": {
                "data_source": "even" if len(row) % 2 == 0 else "odd",
                "steps": [{"reward": r, "says": "go on"} for r in row[:-1]] + [{"reward": row[-1]}],
            },
            "uid": str(i),
        }
        for i, row in enumerate(rewards)
    ]
    folder = tmp_path / "dumped_evals" / "global_step_1_evals"
    normal = await evaluate([batch[:2], batch[2:]], Scripted({}), config, 1, characters)
    files = {path.name: path.read_text() for path in folder.iterdir()}
    settings = {"step_wise_trajectories": True, "merge_stepwise_output": merged}
    turns = await evaluate([batch[:2], batch[2:]], Scripted(settings), config, 1, characters)
    assert turns == normal
    assert normal["eval/all/avg_score"] == pytest.approx((1.0 + 0.25 - 1.0) / 3)
    assert normal["eval/all/pass_at_1"] == pytest.approx(2 / 3)
    assert normal["eval/all/generate/avg_num_turns"] == 2.0
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    rows = RunFolder(config.trainer.run_dir).read_trajectories(1, "eval")
    steps = [("0", 0), ("1", 0), ("2", 0)] if merged else [(str(i), k) for i in range(3) for k in range(i + 1)]
    assert [(row["uid"], row["step"]) for row in rows] == steps
