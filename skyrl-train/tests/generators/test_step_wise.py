"""Turns as training samples of their own: what each row is, and that nothing else changes by it."""

from dataclasses import replace
from typing import Any

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.rlm.env import RLMEnv
from skyrl_train.config import ChatTemplateConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators import skyrl_gym_generator
from skyrl_train.generators.base import GeneratorOutput, TrajectoryID
from skyrl_train.rollouts.adapter import (
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
    to_generator_output,
    to_rollout_batch,
)
from skyrl_train.rollouts.faults import record_faults
from skyrl_train.rollouts.filters import map_trajectories
from skyrl_train.rollouts.joining import merge_all_turns, merge_appending_turns
from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train_testing.tiny_runs import register_environments

STEP_WISE = {"step_wise_trajectories": True}
MERGED = STEP_WISE | {"merge_stepwise_output": True}
TOKEN_COLUMNS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "weight_versions")


def texts(tokenizer, column) -> list[str]:
    return [tokenizer.decode(ids) for ids in column]


def groups_of(output: GeneratorOutput, num_trajectories: int = 2) -> RolloutBatch:
    """Return an output of one prompt as groups."""
    return to_rollout_batch(output, [TrajectoryID("a", number) for number in range(num_trajectories)])


def merged_turns(output: GeneratorOutput, num_trajectories: int = 2) -> GeneratorOutput:
    return to_generator_output(map_trajectories(groups_of(output, num_trajectories), merge_appending_turns))


def whole_trajectories(output: GeneratorOutput, num_trajectories: int = 2) -> GeneratorOutput:
    """Return an output with one row a trajectory."""
    batch = map_trajectories(
        groups_of(output, num_trajectories),
        lambda each: replace(each, samples=[merge_all_turns(each)], is_step_wise=False),
    )
    return to_generator_output(batch)


def columns(output: GeneratorOutput, *names: str) -> dict[str, Any]:
    return {name: output.get(name) for name in names or (*TOKEN_COLUMNS, "stop_reasons", "failures")}


async def test_each_turn_is_sample_with_engine_prompt(game, say, characters):
    extras = [{"steps": [{"reward": 0.25, "says": "no"}, {"reward": 1.0}]}, {"steps": [{"reward": 0.5}]}]
    played = await game(characters, [[say("a"), say("b")], [say("c")]], extras, settings=STEP_WISE).play()
    output = played.output
    first = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}a<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert texts(characters, output["prompt_token_ids"]) == [first, second, first]
    asked = [request.prompt_token_ids for request in played.engine.requests]
    assert sorted(output["prompt_token_ids"]) == sorted(asked)
    assert texts(characters, output["response_ids"]) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    assert output["rewards"] == [[0.0, 0.25], [0.0, 1.0], [0.0, 0.5]]
    assert output["loss_masks"] == [[1, 1]] * 3
    assert output["rollout_logprobs"] == [[-1.0, -2.0]] * 3
    assert output["weight_versions"] == [[7, 7]] * 3
    assert output["is_last_step"] == [False, True, True]
    assert output["trajectory_ids"] == [TrajectoryID("0", 0), TrajectoryID("0", 0), TrajectoryID("1", 0)]
    assert output["stop_reasons"] == ["stop"] * 3
    assert output["rollout_metrics"]["generate/avg_num_turns"] == 1.5
    assert output["rollout_metrics"]["generate/avg_tokens_per_turn"] == 2.0
    assert output["rollout_metrics"]["environment/turns"] == 1.5  # of the trajectories, not of the rows


def _conversations(say) -> dict[str, dict[str, Any]]:
    """Games that only append: answers, steps and whatever else is special about them."""
    cut = {"stop_reason": "length"}
    return {
        "one turn": {"answers": [say("ab")], "steps": [{"reward": 1.0}]},
        "three turns": {
            "answers": [say("One — ✓"), say("two?"), say("3")],
            "steps": [{"reward": 0.25, "says": " x\n"}, {"reward": -0.5, "says": "y"}, {"reward": 1.0}],
        },
        "closed by us after a stop string": {
            "answers": [say("a!", eos=False), say("b!", eos=False)],
            "steps": [{"reward": 0.5, "says": "x"}, {"reward": 1.0}],
            "sampling": {"stop": ["!"]},
        },
        "step_wise_trajectories": {
            "answers": [say("ab", **cut), say("cd", **cut)],
            "steps": [{"reward": 0.5, "says": "x"}, {"reward": 1.0}],
        },
        "a replaced answer": {
            "answers": [say("abc"), say("d")],
            "steps": [{"says": "x", "action": "ab", "reward": 0.5}, {"reward": 1.0}],
        },
        "an answer put into other words": {
            "answers": [say("abc"), say("d")],
            "steps": [{"says": "x", "action": "XY", "reward": 0.5}, {"reward": 1.0}],
        },
        "no room for another answer": {
            "answers": [say("a")],
            "steps": [{"reward": 0.5, "says": "x y " * 300}],
            "settings": {"max_input_length": 200},
        },
        "no room for the first": {"answers": [], "steps": [], "settings": {"max_input_length": 5}},
        "cut off in the second turn, filtered": {
            "answers": [say("a"), say("bc", **cut)],
            "steps": [{"reward": 0.5, "says": "x"}, {"reward": 1.0}],
            "settings": {"apply_overlong_filtering": True, "zero_reward_on_non_stop": True},
        },
        "failed in the second turn": {"answers": [say("a"), say("bc")], "steps": [{"reward": 0.5, "says": "x"}]},
        "without log-probs": {
            "answers": [say("a"), say("b")],
            "steps": [{"says": "x"}, {"reward": 1.0}],
            "sampling": {"logprobs": None},
        },
        "gsm8k_multi_turn": {
            "answers": [say("12 so #### 13"), say("hm"), say("It is #### 12")],
            "extras": {"reward_spec": {"ground_truth": "12"}},
        },
        "calculator": {
            "answers": [say("<calculator>2*3</calculator>"), say("<answer>6</answer>")],
            "extras": {"reward_spec": {"ground_truth": "6"}},
        },
        "multiply": {
            "answers": [say(r"\boxed{5}"), say(r"\boxed{6}")],
            "extras": {"reward_spec": {"ground_truth": "6"}},
        },
    }


@pytest.mark.first_case
@pytest.mark.parametrize("vocabulary", ["characters", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"])
@pytest.mark.parametrize("name", _conversations(lambda *_, **__: None))
async def test_joined_turns_equal_full_conversation(game, say, characters, qwen, vocabulary, name):
    tokenizer = characters if vocabulary == "characters" else qwen(vocabulary)
    script = _conversations(say)[name]
    is_real = "extras" in script
    answers = [script["answers"]] if is_real else [script["answers"], [say("z")]]
    extras = [script["extras"]] if is_real else [{"steps": script["steps"]}, {"steps": [{"reward": 2.0}]}]

    async def play(settings):
        return await game(
            tokenizer,
            answers,
            extras,
            settings={"max_turns": 3} | script.get("settings", {}) | settings,
            sampling=script.get("sampling", {}),
            env_class=name if is_real else "scripted",
        ).play()

    normal, turns, merged = [(await play(settings)).output for settings in ({}, STEP_WISE, MERGED)]
    has_failed = name == "failed in the second turn"
    assert [failure is not None for failure in normal["failures"] or []] == [has_failed, False][: len(answers)]
    assert columns(merged) == columns(normal)
    assert columns(whole_trajectories(turns, len(answers))) == columns(normal)
    assert merged["is_last_step"] == [True] * len(answers)
    assert turns["rollout_metrics"] == merged["rollout_metrics"] == normal["rollout_metrics"]
    scores = get_metrics_from_generator_output(normal, ["p"] * len(answers))
    for output in (merged, turns):
        assert get_metrics_from_generator_output(output, ["p"] * len(output["response_ids"])) == scores
    joined = [concatenate_generator_outputs([output, renamed(output)]) for output in (normal, turns, merged)]
    assert joined[0]["rollout_metrics"] == joined[1]["rollout_metrics"] == joined[2]["rollout_metrics"]
    for output in (turns, merged):
        batch = groups_of(output, len(answers))
        assert record_faults(batch) == batch


def renamed(output: Any) -> GeneratorOutput:
    """The same trajectories under other names."""
    ids = [TrajectoryID(f"other {each.instance_id}", 0) for each in output["trajectory_ids"]]
    return GeneratorOutput(**{**output, "trajectory_ids": ids})


async def test_all_turns_of_failed_trajectory_are_masked_with_failure(game, say, characters):
    extras = [{"steps": [{"reward": 0.5, "says": "x"}]}, {"steps": [{"reward": 1.0}]}]
    played = await game(characters, [[say("a"), say("b")], [say("c")]], extras, settings=STEP_WISE).play()
    output = played.output
    failure, same, none = output["failures"]
    assert failure == same and none is None
    message = "environment 'scripted': step raised IndexError: list index out of range ("
    assert failure.kind == "environment" and failure.message.startswith(message)
    assert texts(characters, output["response_ids"]) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    assert output["loss_masks"] == [[0, 0], [0, 0], [1, 1]]
    assert output["rewards"] == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert output["stop_reasons"] == ["error", "error", "stop"]
    assert output["is_last_step"] == [False, True, True]
    assert output["rollout_metrics"]["generate/num_failed/environment"] == 1.0


async def test_unstarted_trajectory_is_single_masked_row(game, say, characters):
    extras = [{"steps": [], "raises": {"init": RuntimeError("boom")}}]
    played = await game(characters, [[say("a")]], extras, settings=STEP_WISE).play()
    assert texts(characters, played.output["prompt_token_ids"]) == [
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert (played.output["loss_masks"], played.output["is_last_step"]) == ([[0]], [True])


async def test_retried_trajectory_has_turns_of_last_attempt(game, say, characters, monkeypatch):
    monkeypatch.setattr(skyrl_gym_generator, "RETRY_DELAY_SECONDS", 0.0)
    answers = [[say("a"), ConnectionError("gone"), say("c"), say("d")]]
    extras = [{"steps": [{"says": "x"}, {"reward": 1.0}]}]
    played = await game(characters, answers, extras, settings=STEP_WISE).play()
    assert texts(characters, played.output["response_ids"]) == ["c<|im_end|>", "d<|im_end|>"]
    assert played.output["failures"] == [None, None]


async def test_empty_response_is_masked_row(game, say, characters):
    answers = [[say("a"), say("", stop_reason="length")]]
    extras = [{"steps": [{"says": "x"}, {"reward": 1.0}]}]
    output = (await game(characters, answers, extras, settings=STEP_WISE).play()).output
    assert (output["loss_masks"], output["rewards"]) == ([[1, 1], [0]], [[0.0, 0.0], [1.0]])


async def test_step_wise_is_refused_for_single_growing_message(game, say, characters):
    settings = STEP_WISE | {"use_conversation_multi_turn": False}
    with pytest.raises(ConfigError, match="step_wise_trajectories=true"):
        await game(characters, [[say("a")]], [{"steps": [{}]}], settings=settings).play()


class TestRewrittenHistory:
    """The model reads another past in each turn; each turn is trained on with the past that it was given."""

    answers = ("<think>hm</think>\n\na", "<think>ah</think>b", "c")
    steps = ({"reward": 0.5, "says": "x"}, {"says": "y"}, {"reward": 1.0})

    async def play(self, game, say, tokenizer, settings):
        answers, extras = [[say(text) for text in self.answers]], [{"steps": list(self.steps)}]
        return await game(tokenizer, answers, extras, settings=settings).play()

    async def test_template_dropping_thoughts_works_step_wise(self, game, say, characters):
        """The template keeps the reasoning of the last answer, so the history changes in the third turn for the first
        time.
        """
        settings = STEP_WISE | {"chat_template": ChatTemplateConfig(name_or_path="qwen3_without_thinking")}
        played = await self.play(game, say, characters, settings)
        output = played.output
        first = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        x, y = (f"<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n" for said in "xy")
        assert texts(characters, output["prompt_token_ids"]) == [
            first,
            f"{first}<think>hm</think>\n\na{x}",
            f"{first}a{x}<think>ah</think>b{y}",
        ]
        assert output["prompt_token_ids"] == [r.prompt_token_ids for r in played.engine.requests]
        assert texts(characters, output["response_ids"]) == [f"{text}<|im_end|>" for text in self.answers]
        lengths = [len(text) + 1 for text in self.answers]
        assert output["loss_masks"] == [[1] * n for n in lengths]
        assert output["rollout_logprobs"] == [[-(j + 1.0) for j in range(n)] for n in lengths]
        assert [sum(rewards) for rewards in output["rewards"]] == [0.5, 0.0, 1.0]

        merged = (await self.play(game, say, characters, settings | MERGED)).output
        between = [0] * (len(characters.tokenize(x)) - 1)
        assert merged["loss_masks"] == [[1] * lengths[0] + between + [1] * lengths[1], [1] * lengths[2]]
        assert merged["prompt_token_ids"] == [output["prompt_token_ids"][row] for row in (0, 2)]
        assert merged["is_last_step"] == [False, True]
        assert merged["rollout_metrics"] == output["rollout_metrics"]

    async def test_step_wise_works_without_generation_blocks(self, game, say, characters, tmp_path):
        path = tmp_path / "plain.jinja"
        path.write_text(characters.chat_template)
        template = ChatTemplateConfig(source="file", name_or_path=str(path))
        merged = await self.play(game, say, characters, MERGED | {"chat_template": template})
        normal = await self.play(game, say, characters, {})
        # rendered anew but to the same text: what the model read is what it wrote, so the turns are joined
        assert columns(merged.output) == columns(normal.output)

    async def test_environment_may_remove_message(self, game, say, characters):
        with register_environments(forgetful=Forgetful):
            answers = [[say("a"), say("b")]]
            played = await game(characters, answers, [{}], env_class="forgetful", settings=STEP_WISE).play()
            normal = await game(characters, answers, [{}], env_class="forgetful").play()
        assistant = "<|im_start|>assistant\n"
        question = "<|im_start|>user\nQ<|im_end|>\n"
        assert texts(characters, played.output["prompt_token_ids"]) == [
            f"{question}<|im_start|>user\nhint 0<|im_end|>\n{assistant}",
            f"{question}{assistant}a<|im_end|>\n<|im_start|>user\nhint 1<|im_end|>\n{assistant}",
        ]
        assert texts(characters, played.output["response_ids"]) == ["a<|im_end|>", "b<|im_end|>"]
        # a conversation that is one sample only ever grows
        assert "hint 0" in characters.decode(normal.engine.requests[1].prompt_token_ids)


@pytest.mark.slow  # starts a REPL
async def test_ephemeral_prompt_of_recursive_environment_works_step_wise(game, say, characters):
    (example, *_) = RLMEnv.examples()
    answers = [[say("```repl\nprint(1)\n```"), *map(say, example.oracle)]]
    gym = {"env_configs": {"rlm": dict(example.env_config) | {"ephemeral_turn_prompt": True}}}
    settings = {"max_turns": 3, "max_input_length": 10_000} | STEP_WISE
    played = await game(characters, answers, [example.extras], env_class="rlm", settings=settings, gym=gym).play()
    first, second = texts(characters, played.output["prompt_token_ids"])
    assert played.output["failures"] == [None, None]
    assert [sum(rewards) for rewards in played.output["rewards"]] == [0.0, 1.0]
    assert first.count("Question:") == second.count("Question:") == 1
    assert "You have not seen the context yet" in first and "You have not seen the context yet" not in second


class Forgetful(BaseTextEnv):
    """Says something new at the end of the history in each turn, and takes it out again afterwards."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def init(self, prompt, seed=None):
        self.history = [*prompt, {"role": "user", "content": "hint 0"}]
        return self.history, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self.turns == 2:
            return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})
        self.history.pop()
        hint = {"role": "user", "content": f"hint {self.turns}"}
        return BaseTextEnvStepOutput(observations=[hint], reward=0.0, done=False, metadata={})


def steps_output(**changes) -> GeneratorOutput:
    """A trajectory of three turns, of which the third forgets the first; and one of a single turn."""
    made = {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 9, 8], [1, 2, 5], [4]],
        "response_ids": [[3], [5, 6], [7], [3, 3]],
        "rewards": [[0.5], [0.0, 1.0], [2.0], [0.0, 4.0]],
        "loss_masks": [[1], [1, 0], [1], [1, 1]],
        "stop_reasons": ["stop"] * 4,
        "rollout_metrics": {"environment/turns": 2.0},
        "rollout_logprobs": [[-1.0], [-2.0, 0.0], [-3.0], [-4.0, -5.0]],
        "trajectory_ids": [TrajectoryID("a", 0)] * 3 + [TrajectoryID("a", 1)],
        "is_last_step": [False, False, True, True],
        "weight_versions": [[7], [8, -1], [8], [7, 7]],
        "failures": [None] * 4,
    }
    return GeneratorOutput(**(made | changes))


def test_turns_are_joined_while_each_extends_previous():
    merged: Any = merged_turns(steps_output())
    assert columns(merged, *TOKEN_COLUMNS) == {
        "prompt_token_ids": [[1, 2], [1, 2, 5], [4]],
        "response_ids": [[3, 9, 8, 5, 6], [7], [3, 3]],
        "rewards": [[0.5, 0.0, 0.0, 0.0, 1.0], [2.0], [0.0, 4.0]],
        "loss_masks": [[1, 0, 0, 1, 0], [1], [1, 1]],
        "rollout_logprobs": [[-1.0, 0.0, 0.0, -2.0, 0.0], [-3.0], [-4.0, -5.0]],
        "weight_versions": [[7, -1, -1, 8, -1], [8], [7, 7]],
    }
    assert merged["is_last_step"] == [False, True, True]
    assert merged["trajectory_ids"] == [TrajectoryID("a", 0)] * 2 + [TrajectoryID("a", 1)]
    assert merged_turns(merged) == merged
    assert [len(each.samples) for each in groups_of(merged).trajectories] == [2, 1]


def test_scalar_turn_reward_is_at_last_token():
    merged = merged_turns(steps_output(rewards=[0.5, 1.0, 2.0, 4.0]))
    assert merged["rewards"] == [[0.5, 0.0, 0.0, 0.0, 1.0], [2.0], [0.0, 4.0]]


def test_joining_does_not_modify_input():
    output = steps_output()
    merged_turns(output)
    assert output == steps_output()


def test_single_sample_trajectory_is_unchanged():
    for trajectory in groups_of(steps_output(is_last_step=None), 4).trajectories:
        assert merge_appending_turns(trajectory) is trajectory
        assert merge_all_turns(trajectory) is trajectory.samples[0]


def test_scores_are_per_trajectory():
    # 0.5 + 1 + 2 = 3.5 and 4, of one prompt
    scores = get_metrics_from_generator_output(steps_output(), ["a"] * 4)
    assert scores == {"avg_score": 3.75, "pass_at_n": 1.0, "mean_positive_reward": 3.75}
    # a trajectory that gains 0.5 in its first turn and loses more later has not solved anything
    lost = steps_output(rewards=[[0.5], [0.0, 0.0], [-1.0], [0.0, 0.0]])
    scores = get_metrics_from_generator_output(lost, ["a"] * 4)
    assert scores == {"avg_score": -0.25, "pass_at_n": 0.0, "mean_positive_reward": 0.0}


def test_trajectories_file_has_turns(characters):
    rows = build_trajectory_rows(groups_of(steps_output()).groups, characters)
    assert [(row["sample"], row["step"], row["is_last_step"], row["reward"]) for row in rows] == [
        (0, 0, False, 0.5),
        (0, 1, False, 1.0),
        (0, 2, True, 2.0),
        (1, 0, True, 4.0),
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"is_last_step": [False, True, True, True]}, r"Mismatch between prompts \(2\) and responses \(3\)"),
        ({"is_last_step": [False, True, False, True]}, r"is_last_step is True in row 1 of trajectory a_0"),
        ({"is_last_step": [True, False, False, True]}, r"is_last_step is True in row 0 of trajectory a_0"),
        ({"trajectory_ids": None}, "is_last_step needs trajectory_ids"),
        (
            {
                "trajectory_ids": [TrajectoryID(name, 0) for name in "abba"],
                "is_last_step": [True, False, True, True],
            },
            "must differ between trajectories",
        ),
    ],
)
def test_non_consecutive_rows_are_refused(changes, message):
    num_prompts = 3 if "differ" in message else 2
    with pytest.raises(ValueError, match=message):
        groups_of(steps_output(**changes), num_prompts)
