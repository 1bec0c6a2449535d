import json

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows
from skyrl_train.rollouts.types import Failure, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID
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


def groups(answered: TrainingSample | None = None) -> list[TrajectoryGroup]:
    """`1+2=` answered with `3<eos>` and with a failure."""
    sample = TrainingSample([1, 10, 2, 11], [3, 12], [1, 1], [0.25, 0.75], [-0.5, -0.10000000149011612], [7, 8])
    empty = TrainingSample([1, 10, 2, 11], [], [], [], [], [])
    trajectories = [
        Trajectory(TrajectoryID("a", 0), [answered or sample], "stop"),
        Trajectory(TrajectoryID("a", 1), [empty], "error", Failure("tool", "timed out")),
    ]
    return [TrajectoryGroup("a", trajectories)]


def test_row_has_prompt_response_and_reward(symbols):
    row, _ = build_trajectory_rows(groups(), symbols)
    assert row == {
        "uid": "a",
        "sample": 0,
        "prompt": "1+2=",
        "response": "3<eos>",
        "reward": 1.0,
        "stop_reason": "stop",
        "failure": None,
        "env_class": "",
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


def test_failed_trajectory_is_written_as_row(symbols):
    _, row = build_trajectory_rows(groups(), symbols)
    assert (row["sample"], row["response"], row["reward"], row["tokens"]["text"]) == (1, "", 0, [])
    assert row["failure"] == {"kind": "tool", "message": "timed out"}


def test_trajectory_turns_are_rows_with_step(symbols):
    turns = [TrainingSample([1], [3], [1], [reward]) for reward in (0.5, 2.0)]
    [group] = [TrajectoryGroup("b#2", [Trajectory(TrajectoryID("b", 4), turns, "stop", is_step_wise=True)])]
    rows = build_trajectory_rows([group], symbols)
    found = [(row["uid"], row["sample"], row["step"], row["is_last_step"], row["reward"]) for row in rows]
    assert found == [("b#2", 4, 0, False, 0.5), ("b#2", 4, 1, True, 2.0)]


def test_unreported_values_are_null(symbols):
    trajectory = Trajectory(TrajectoryID("a", 0), [TrainingSample([1], [3], [1], [1.0])])
    [row] = build_trajectory_rows([TrajectoryGroup("a", [trajectory])], symbols)
    assert (
        row["stop_reason"] is row["failure"] is row["tokens"]["log_probs"] is row["tokens"]["weight_versions"] is None
    )


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    trajectory = Trajectory(TrajectoryID("a", 0), [TrainingSample([0], ids, [1] * len(ids), [0.0] * len(ids))])
    [row] = build_trajectory_rows([TrajectoryGroup("a", [trajectory])], tokenizer)
    return row["tokens"]["text"]


def test_multi_token_character_is_attributed_to_last_token():
    # The four bytes of 🦊 and an a, as byte-level vocabularies write them, and a byte that is no character.
    bytes_ = tokenizer_of(["<unk>", "ð", "Ł", "¦", "Ĭ", "a", "ÿ"], decoders.ByteLevel())
    assert token_texts(bytes_, [5, 1, 2, 3, 4, 5]) == ["a", "", "", "", "🦊", "a"]
    assert token_texts(bytes_, [6, 5]) == ["\ufffd", "a"]


def test_sentencepiece_leading_space_is_kept():
    words = tokenizer_of(["<unk>", "▁Once", "▁upon", "s"], decoders.Metaspace())
    assert token_texts(words, [1, 2, 3]) == [" Once", " upon", "s"]


def test_rows_round_trip_through_disk(symbols, tmp_path):
    rows = build_trajectory_rows(groups(), symbols)
    run = RunFolder(tmp_path)
    run.write_trajectories(1, "train", rows)
    assert run.read_trajectories(1, "train") == json.loads(json.dumps(rows))
