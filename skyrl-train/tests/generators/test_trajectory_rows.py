import json

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skyrl_train.generators.base import Failure, GeneratorOutput, TrajectoryID
from skyrl_train.generators.trajectory_rows import trajectory_rows
from skyrl_train.utils.run_folder import RunFolder


def tokenizer_of(vocabulary: list[str], decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    model = models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=vocabulary[0])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SYMBOLS = [*"0123456789", "+", "=", "<eos>"]


@pytest.fixture
def symbols() -> PreTrainedTokenizerFast:
    return tokenizer_of(SYMBOLS, decoders.Fuse())


def output(**changes) -> GeneratorOutput:
    """`1+2=` answered with `3<eos>` and with a failure."""
    made = GeneratorOutput(
        prompt_token_ids=[[1, 10, 2, 11], [1, 10, 2, 11]],
        response_ids=[[3, 12], []],
        rewards=[[0.25, 0.75], []],
        loss_masks=[[1, 1], []],
        stop_reasons=["stop", "error"],
        rollout_metrics=None,
        rollout_logprobs=[[-0.5, -0.10000000149011612], []],
        weight_versions=[[7, 8], []],
        failures=[None, Failure("tool", "timed out")],
    )
    return GeneratorOutput(**(made | changes))


def test_a_row_says_what_was_asked_answered_and_earned(symbols):
    row, _ = trajectory_rows(output(), ["a", "a"], symbols)
    assert row == {
        "uid": "a",
        "sample": 0,
        "prompt": "1+2=",
        "response": "3<eos>",
        "reward": 1.0,
        "stop_reason": "stop",
        "failure": None,
        "prompt_ids": [1, 10, 2, 11],
        "tokens": {
            "text": ["3", "<eos>"],
            "ids": [3, 12],
            "loss_mask": [1, 1],
            "log_probs": [-0.5, -0.100000001],  # a float32 in nine digits
            "rewards": [0.25, 0.75],
            "weight_versions": [7, 8],
        },
    }


def test_a_failed_trajectory_is_a_row_too(symbols):
    _, row = trajectory_rows(output(), ["a", "a"], symbols)
    assert (row["sample"], row["response"], row["reward"], row["tokens"]["text"]) == (1, "", 0, [])
    assert row["failure"] == {"kind": "tool", "message": "timed out"}


def test_the_reward_of_a_response_stands_on_its_last_token(symbols):
    rows = trajectory_rows(output(rewards=[2.0, 0.0]), ["a", "b"], symbols)
    assert [row["reward"] for row in rows] == [2.0, 0.0]
    assert [row["tokens"]["rewards"] for row in rows] == [[0.0, 2.0], []]


def test_sample_numbers_come_from_the_trajectory_ids_if_there_are_any(symbols):
    ids = [TrajectoryID("a", 4), TrajectoryID("a", 2)]
    rows = trajectory_rows(output(trajectory_ids=ids, is_last_step=[False, True]), ["a", "a"], symbols)
    assert [(row["sample"], row["is_last_step"]) for row in rows] == [(4, False), (2, True)]


def test_what_a_generator_does_not_report_is_null(symbols):
    bare = output(stop_reasons=None, rollout_logprobs=None, weight_versions=None, failures=None)
    row, _ = trajectory_rows(bare, ["a", "a"], symbols)
    assert (
        row["stop_reason"] is row["failure"] is row["tokens"]["log_probs"] is row["tokens"]["weight_versions"] is None
    )


def test_conversations_are_kept_if_given(symbols):
    conversation = [{"role": "user", "content": "1+2="}]
    row, _ = trajectory_rows(output(), ["a", "a"], symbols, prompts=[conversation, conversation])
    assert row["messages"] == conversation


def test_lists_of_different_lengths_are_an_error(symbols):
    with pytest.raises(ValueError, match="zip"):
        trajectory_rows(output(), ["a"], symbols)


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    made = output(response_ids=[ids], prompt_token_ids=[[0]], rewards=[0.0], loss_masks=[[1] * len(ids)])
    made["rollout_logprobs"] = made["stop_reasons"] = made["weight_versions"] = made["failures"] = None
    [row] = trajectory_rows(made, ["a"], tokenizer)
    return row["tokens"]["text"]


def test_a_character_of_several_tokens_stands_on_the_last():
    # The four bytes of 🦊 and an a, as byte-level vocabularies write them, and a byte that is no character.
    bytes_ = tokenizer_of(["<unk>", "ð", "Ł", "¦", "Ĭ", "a", "ÿ"], decoders.ByteLevel())
    assert token_texts(bytes_, [5, 1, 2, 3, 4, 5]) == ["a", "", "", "", "🦊", "a"]
    assert token_texts(bytes_, [6, 5]) == ["\ufffd", "a"]


def test_the_space_before_a_sentencepiece_word_is_kept():
    words = tokenizer_of(["<unk>", "▁Once", "▁upon", "s"], decoders.Metaspace())
    assert token_texts(words, [1, 2, 3]) == [" Once", " upon", "s"]


def test_rows_go_to_disk_and_back(symbols, tmp_path):
    rows = trajectory_rows(output(), ["a", "a"], symbols)
    run = RunFolder(tmp_path)
    run.write_trajectories(1, "train", rows)
    assert run.read_trajectories(1, "train") == json.loads(json.dumps(rows))
