"""Padding: prompts on the left, responses on the right."""

import pytest
import torch

from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors


class Padding:
    pad_token_id = 0


def test_two_trajectories_of_different_lengths():
    sequences, attention_mask, response_mask, rewards, loss_masks, logprobs = (
        convert_prompts_responses_to_batch_tensors(
            Padding(),  # pyright: ignore[reportArgumentType]
            prompts=[[1, 2, 3], [4]],
            responses=[[5], [6, 7]],
            rewards=[[1.0], [0.0, 0.5]],
            loss_masks=[[1], [1, 0]],
            logprobs=[[-0.5], [-1.0, 0.0]],
        )
    )
    assert sequences.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert response_mask.tolist() == [[1, 0], [1, 1]]
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 0.5]]
    assert loss_masks.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert logprobs is not None and logprobs.tolist() == [[-0.5, 0.0], [-1.0, 0.0]]
    assert (sequences.dtype, attention_mask.dtype, loss_masks.dtype) == (torch.int64, torch.int64, torch.float32)


def test_pad_id_used_as_token_is_attended():
    sequences, attention_mask, *_ = convert_prompts_responses_to_batch_tensors(
        Padding(),  # pyright: ignore[reportArgumentType]
        [[0, 1]], [[2, 0]], [[0.0, 0.0]], [[1, 1]],
    )  # fmt: skip
    assert sequences.tolist() == [[0, 1, 2, 0]]
    assert attention_mask.tolist() == [[1, 1, 1, 1]]


def test_missing_log_probs_stay_missing():
    *_, logprobs = convert_prompts_responses_to_batch_tensors(Padding(), [[1]], [[2]], [[0.0]], [[1]])  # pyright: ignore
    assert logprobs is None


@pytest.mark.parametrize(
    "columns, message",
    [
        (([], [], [], []), "responses is empty"),
        (
            ([[1]], [[2], [3]], [[0.0], [0.0]], [[1], [1]]),
            "prompts must have the same length as responses; got 1 and 2",
        ),
        (
            ([[1]], [[2, 3]], [[0.0]], [[1, 1]]),
            "rewards must have one entry per response token; trajectory 0 has 1 for 2",
        ),
        (([[1]], [[2]], [[0.0]], [[1, 1]]), "loss_masks"),
        (([[1]], [[2]], [[0.0]], [[1]], [[0.0, 0.0]]), "logprobs must have one entry per response token"),
    ],
)
def test_mismatched_lists_are_rejected(columns, message):
    with pytest.raises(ValueError, match=message):
        convert_prompts_responses_to_batch_tensors(Padding(), *columns)  # pyright: ignore[reportArgumentType]
