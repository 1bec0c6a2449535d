"""Outputs in which a trajectory has several rows, one a turn: which rows belong together, and how they are joined. Pure
functions; outputs with one row a trajectory (no `is_last_step`) pass through them unchanged.

The rows of a trajectory stand next to each other, in the order of its turns; `is_last_step` is True on the last.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.generators.dialogue import NOT_WRITTEN
from skyrl_train.generators.rewards import reward_of_each_token

T = TypeVar("T")


def rows_of_trajectories(output: GeneratorOutput) -> list[range]:
    """The rows of each trajectory, in order."""
    last_steps = output.get("is_last_step")
    if last_steps is None:
        return [range(row, row + 1) for row in range(len(output["response_ids"]))]
    ends = [row + 1 for row, is_last in enumerate(last_steps) if is_last]
    return [range(start, end) for start, end in pairwise([0, *ends])]


def per_row(output: GeneratorOutput, values: Sequence[T]) -> list[T]:
    """What is known of each trajectory (its prompt's uid, say), for each row."""
    rows = rows_of_trajectories(output)
    return [value for value, own in zip(values, rows, strict=True) for _ in own]


def merge_steps(output: GeneratorOutput) -> GeneratorOutput:
    """Joins turns that only append, so that no token is computed twice: a row whose prompt begins with the whole row
    before (its prompt and its response) is joined to that one; where a prompt does not, a new row starts.

    What stands between two joined responses gets loss mask 0, reward 0, log-prob 0 and weight version -1. The prompt is
    the first row's; everything that there is one of a row is the last one's. Rewards become one a token.

    For a conversation that only ever appends (and whose every answer has a token), this is what the same conversation
    is without step-wise trajectories.
    """
    if output.get("is_last_step") is None:
        return output
    groups: list[list[int]] = []
    for rows in rows_of_trajectories(output):
        for row in rows:
            if row > rows.start and _tokens_between(output, row) is not None:
                groups[-1].append(row)
            else:
                groups.append([row])
    return _joined(output, groups)


def whole_trajectories(output: GeneratorOutput) -> GeneratorOutput:
    """One row a trajectory, for metrics and for people to read: all of its turns joined. Where a turn's prompt does not
    begin with the turn before (the history was rewritten), its response simply follows."""
    if output.get("is_last_step") is None:
        return output
    joined = _joined(output, rows_of_trajectories(output))
    joined["is_last_step"] = None
    return joined


def _tokens_between(output: GeneratorOutput, row: int) -> list[int] | None:
    """What came between the response of the row before and this row's; None if this row's prompt does not begin with
    the row before."""
    before = output["prompt_token_ids"][row - 1] + output["response_ids"][row - 1]
    prompt = output["prompt_token_ids"][row]
    return prompt[len(before) :] if prompt[: len(before)] == before else None


def _joined(output: GeneratorOutput, groups: Sequence[Sequence[int]]) -> GeneratorOutput:
    """One row for each group of consecutive rows."""
    between = [[_tokens_between(output, row) or [] for row in rows[1:]] for rows in groups]

    def filled_with(value: float) -> list[list[list[Any]]]:
        return [[[value] * len(tokens) for tokens in gaps] for gaps in between]

    joined: dict[str, Any] = {
        key: [column[rows[-1]] for rows in groups] if isinstance(column, list) else column
        for key, column in output.items()
    }
    rewards = [
        reward_of_each_token(reward, len(response))
        for reward, response in zip(output["rewards"], output["response_ids"], strict=True)
    ]
    log_probs, versions = output["rollout_logprobs"], output.get("weight_versions")
    joined["prompt_token_ids"] = [output["prompt_token_ids"][rows[0]] for rows in groups]
    joined["response_ids"] = _spliced(output["response_ids"], groups, between)
    joined["rewards"] = _spliced(rewards, groups, filled_with(0.0))
    joined["loss_masks"] = _spliced(output["loss_masks"], groups, filled_with(0))
    joined["rollout_logprobs"] = None if log_probs is None else _spliced(log_probs, groups, filled_with(0.0))
    joined["weight_versions"] = None if versions is None else _spliced(versions, groups, filled_with(NOT_WRITTEN))
    return GeneratorOutput(**joined)


def _spliced(
    column: Sequence[list[Any]], groups: Sequence[Sequence[int]], between: Sequence[Sequence[list[Any]]]
) -> list[list[Any]]:
    """The entries of each group one after the other, with what stands between them."""
    spliced = []
    for rows, gaps in zip(groups, between, strict=True):
        entry = list(column[rows[0]])
        for row, gap in zip(rows[1:], gaps, strict=True):
            entry += gap
            entry += column[row]
        spliced.append(entry)
    return spliced
