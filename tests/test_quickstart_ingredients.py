import importlib
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import skyrl_gym
from skyrl_inspect.curve_bands import CurveWatch, read_bands

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def quickstart():
    """The quickstart's files, imported as they import each other, and forgotten afterwards."""
    names = ("tasks", "model", "warm_up", "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUICKSTART)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer(quickstart, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    quickstart.model.make_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def play(row, turns):
    """The reward of an episode in which the assistant says its turns, and what the environment said in between."""
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")} | {"max_turns": 2}
    env = skyrl_gym.make(row["env_class"], env_config={}, extras=extras)
    reward, heard = 0.0, []
    for turn in turns:
        if turn["role"] == "assistant":
            output = env.step(turn["content"])
            reward += output["reward"]
            heard += output["observations"]
    return reward, heard


def test_script_settings_keep_spaces(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUICKSTART)
        run = importlib.import_module("run")
    del sys.modules["run"]
    folder = tmp_path / "my runs"
    settings = run.script_settings(folder, "arithmetic", ["trainer.run_name=two words"])
    assert f"data.train_data=['{folder}/data/train.parquet']" in settings
    assert f"trainer.policy.model.path={folder}/model" in settings
    assert settings[-1] == "trainer.run_name=two words" and all("=" in each for each in settings)


def test_tokenizer_round_trips_text(tokenizer):
    text = "7+8=15, user <answer>85</answer>\n  it's .5 ."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer.encode("<answer>85</answer>")) == 4
    assert (tokenizer.pad_token_id, tokenizer.eos_token, len(tokenizer)) == (0, "<|im_end|>", 109)


def test_chat_template_renders_messages(tokenizer):
    messages = [{"role": "user", "content": "37+48"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n37+48<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name, parameters", [("arithmetic", 130_304), ("calculator", 191_936)])
def test_model_initialization_follows_seed(quickstart, name, parameters):
    task = quickstart.tasks.TASKS[name]
    first, again, other = (quickstart.model.make_model(task, seed) for seed in (0, 0, 1))
    assert first.num_parameters() == parameters
    weight = "model.embed_tokens.weight"
    assert torch.equal(first.state_dict()[weight], again.state_dict()[weight])
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])


@pytest.mark.parametrize("name", ["arithmetic", "calculator"])
def test_validation_problems_are_excluded_from_training(quickstart, name):
    task = quickstart.tasks.TASKS[name]
    train, validation = (quickstart.tasks.make_rows(task, 500, 0, held_out) for held_out in (False, True))
    problems = [{row["extra_info"]["problem"] for row in rows} for rows in (train, validation)]
    assert len(train) == len(validation) == 500
    assert not problems[0] & problems[1]
    assert train[0]["env_class"] == name
    assert train[0]["prompt"] == [{"role": "user", "content": train[0]["extra_info"]["problem"]}]


@pytest.mark.parametrize("name, lowest, highest", [("arithmetic", 0.2, 0.5), ("calculator", 0.3, 0.5)])
def test_demonstrations_include_environment_feedback(quickstart, name, lowest, highest):
    task, draw = quickstart.tasks.TASKS[name], random.Random(0)
    rewards = []
    for row in quickstart.tasks.make_rows(task, 400, 0):
        turns = task.demonstrate(row["extra_info"]["problem"], draw)
        reward, heard = play(row, turns)
        assert heard == [turn for turn in turns if turn["role"] == "user"]
        rewards.append(reward)
    assert lowest < sum(rewards) / len(rewards) < highest


def test_demonstration_ids_match_rollout(quickstart, tokenizer):
    """Rollouts tokenize the environment's messages apart from the model's text, behind a fixed base."""
    prompt = [{"role": "user", "content": "37*48"}]
    turns = [
        {"role": "assistant", "content": "<calculator>37*48</calculator>"},
        {"role": "user", "content": "<result>1776</result>"},
        {"role": "assistant", "content": "<answer>1776</answer>"},
    ]

    def template(messages, add_generation_prompt):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)

    def spoken(text):
        return [*tokenizer.encode(text), tokenizer.eos_token_id]

    base_messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "I am a user."}]
    base = template(base_messages, False)[:-1]  # up to the end token: the line break after it is the observation's
    assert base[-1] == tokenizer.eos_token_id
    observation = template([*base_messages, turns[1]], True)[len(base) :]
    asked, call, answer = template(prompt, True), spoken(turns[0]["content"]), spoken(turns[2]["content"])

    ids, mask = quickstart.warm_up.encode_conversation(tokenizer, prompt, turns)
    assert ids == [*asked, *call, *observation, *answer]
    assert mask == [0] * len(asked) + [1] * len(call) + [0] * len(observation) + [1] * len(answer)


@pytest.mark.slow
def test_quickstart_commands_run(quickstart, tmp_path, monkeypatch):
    def command(script, *arguments):
        """Run a script as a program, in this process, which has imported torch and transformers already."""
        command_line = [script, "--task", "arithmetic", "--seed", "1", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command_line)
        runpy.run_path(str(QUICKSTART / script), run_name="__main__")

    command("model.py", "--output", tmp_path / "new")
    command("warm_up.py", "--model", tmp_path / "new", "--output", tmp_path / "warm", "--num_steps", "20")
    command("data.py", "--output", tmp_path / "data", "--num_train", "10", "--num_validation", "3")
    new, warm = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("new", "warm"))
    assert warm.config.architectures == ["Qwen3ForCausalLM"] and warm.dtype == torch.float32
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "warm").encode("<answer>85</answer>")])
    assert warm(input_ids=ids, labels=ids).loss < new(input_ids=ids, labels=ids).loss

    from pyarrow import parquet

    train, validation = (parquet.read_table(tmp_path / "data" / f"{n}.parquet") for n in ("train", "validation"))
    assert (train.num_rows, validation.num_rows) == (10, 3)
    assert set(train.column_names) == {"prompt", "env_class", "data_source", "reward_spec", "extra_info"}


def test_untrained_model_leaves_expected_arithmetic_curves():
    expected = read_bands(str(QUICKSTART / "bands" / "arithmetic.yaml"))
    (band,) = expected.bands
    watch, outside = CurveWatch(expected), f"expected/{band.metric}/outside"
    (first, low, high), (last, *_) = band.points[0], band.points[-1]
    assert band.metric == "reward/avg_raw_reward"
    assert watch.observe(first, {band.metric: (low + high) / 2})[outside] == 0
    assert watch.observe(last, {band.metric: (low + high) / 2})[outside] == -1
