"""Rows of recorded agents: a tree as one would draw it, each drawn token in the loss once, and a certificate that finds
what is not as it was drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.endpoint.recorder import RecordedTurn, SessionRecord
from skyrl_train.generators.base import Failure, TrajectoryID
from skyrl_train.generators.recorded import build_recorded_trajectory
from skyrl_train.models.packing import pack_rows
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.rollouts.certificate import Branch, compute_certificate_metrics, create_certificate
from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors
from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows
from skyrl_train.rollouts.types import TrainingSample, group_trajectories
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

SYSTEM = list(range(20, 38))
QUESTION, RESULT, SUMMARY = [40, 41, 42], [43, 44], [45, 46, 47, 48]
ID = TrajectoryID("p", 0)


def said(*texts: str) -> list[dict[str, Any]]:
    """A question and these answers, each followed by a result."""
    roles = [("user", "?"), *(pair for text in texts for pair in (("assistant", text), ("user", "!")))]
    return [{"role": role, "content": content} for role, content in roles]


def turn(prompt: list[int], response: list[int], number: int, messages: Any = None, answer: str = "") -> RecordedTurn:
    return RecordedTurn(
        prompt_ids=prompt,
        response_ids=response,
        log_probs=[-0.125 * token for token in response],
        weight_versions=[3] * len(response),
        stop_reason="stop",
        temperature=1.0,
        messages=messages or said(),
        answer={"role": "assistant", "content": answer},
        request=repr((prompt, number)),
        started=float(number),
        finished=number + 0.5,
    )


def compacting() -> list[RecordedTurn]:
    """Two answers; then the history gives way to a summary, behind which the agent works on for two more."""
    first, second = [50, 51], [52, 53, 54]
    history = [*SYSTEM, *QUESTION, *first, *RESULT]
    short = [*SYSTEM, *SUMMARY]
    return [
        turn([*SYSTEM, *QUESTION], first, 0, said(), "a"),
        turn(history, second, 1, said("a"), "b"),
        turn(short, [55], 2, said(), "c"),
        turn([*short, 55, *RESULT], [56, 57], 3, said("c"), "d"),
    ]


def with_sub_agents() -> list[RecordedTurn]:
    """An answer that delegates; a sub-agent of two answers; then two conversations go on from the first answer."""
    main, other = [*SYSTEM, *QUESTION], [60, 61, 62]
    return [
        turn(main, [50, 51], 0, said(), "a"),
        turn(other, [52], 1, said(), "b"),
        turn([*other, 52, *RESULT], [53, 54], 2, said("b"), "c"),
        turn([*main, 50, 51, *RESULT], [55], 3, said("a"), "d"),
        turn([*main, 50, 51, *SUMMARY], [56, 57], 4, said("a"), "e"),
    ]


DRAWN = {
    "compacting": (compacting, [7, 5], [Branch(None, 0), Branch(0, len(SYSTEM))], {"new_context": 1}),
    "sub-agents": (
        with_sub_agents,
        [5, 5, 2],
        [Branch(None, 0), Branch(None, 0), Branch(0, len(SYSTEM) + len(QUESTION) + 2)],
        {"new_context": 1, "fork": 1},
    ),
}


@pytest.mark.parametrize(("turns", "lengths", "tree", "reasons"), DRAWN.values(), ids=list(DRAWN))
def test_tree_matches_expected_structure(turns: Any, lengths: list[int], tree: list[Branch], reasons: dict[str, int]):
    trajectory = build_recorded_trajectory(SessionRecord(turns=turns(), num_admitted=9, num_answered=9), 2.0, ID)
    certificate = trajectory.certificate
    assert certificate is not None
    assert [len(sample.response_ids) for sample in trajectory.samples] == lengths
    assert (certificate.branches, certificate.new_rows) == (tree, reasons)
    num_drawn = sum(len(each.response_ids) for each in turns())
    assert (certificate.num_drawn, certificate.num_trained, certificate.exact_share) == (num_drawn, num_drawn, 1.0)
    assert not certificate.not_trained
    trained = sorted(
        token
        for sample in trajectory.samples
        for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True)
        if mask
    )
    assert trained == list(range(50, 50 + num_drawn)), "each drawn token once"
    assert [sample.reward for sample in trajectory.samples] == [0.0] * (len(lengths) - 1) + [2.0]


def test_trajectory_stop_reason_is_from_last_response():
    main, sub_agent, last = with_sub_agents()[0], with_sub_agents()[1], with_sub_agents()[3]
    trajectory = build_recorded_trajectory(
        SessionRecord(turns=[main, replace(sub_agent, stop_reason="length"), last]), 1, ID
    )
    assert [len(sample.response_ids) for sample in trajectory.samples] == [5, 1], "the sub-agent's row is the last"
    assert trajectory.stop_reason == "stop"


def test_reward_is_kept_when_last_response_is_empty():
    first = with_sub_agents()[0]
    seen = [*first.prompt_ids, *first.response_ids, 50]
    empty = replace(
        first, prompt_ids=seen, response_ids=[], log_probs=[], weight_versions=[], started=98.0, finished=99.0
    )
    trajectory = build_recorded_trajectory(SessionRecord(turns=[first, empty]), 2.0, ID)
    [sample] = trajectory.samples
    assert sample.response_ids == [*first.response_ids, 50]
    assert sample.rewards == [0.0] * (len(first.response_ids) - 1) + [2.0, 0.0]


def gradients(samples: Sequence[TrainingSample], share: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a loss that weighs each token by its id; and the tokens that the model computed."""
    sequences, attention_mask, response_mask, _, loss_mask, _ = convert_prompts_responses_to_batch_tensors(
        build_character_tokenizer(),
        [sample.prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        [sample.rewards for sample in samples],
        [sample.loss_mask for sample in samples],
        None,
    )
    num_response = response_mask.shape[1]
    with torch.random.fork_rng(devices=[]):
        model = ScoringModel(build_tiny_qwen3(hidden_size=16, vocab_size=64).double(), share_prefixes=share)
    log_probs = model(sequences, attention_mask, num_response, 1.0).log_probs
    (log_probs * loss_mask * sequences[:, -num_response:]).sum().backward()
    num_computed = pack_rows(sequences, attention_mask, num_response, share_prefixes=share).input_ids.numel()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, num_computed


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other)


def separate(turns: Sequence[RecordedTurn]) -> list[TrainingSample]:
    """Each answer behind its own prompt."""
    return [
        sample for each in turns for sample in build_recorded_trajectory(SessionRecord(turns=[each]), 0.0, ID).samples
    ]


@pytest.mark.parametrize("turns", [compacting, with_sub_agents])
def test_branch_gradients_equal_separate_prompt_response_gradients(turns: Any):
    trajectory = build_recorded_trajectory(SessionRecord(turns=turns()), 1.0, ID)
    own, num_computed = gradients(trajectory.samples, share=True)
    expected, num_separate = gradients(separate(turns()), share=False)
    assert difference(own, expected) < 1e-6
    # What branches have in common is computed once.
    assert trajectory.certificate is not None
    lengths = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in trajectory.samples)
    assert num_computed == lengths - sum(branch.start for branch in trajectory.certificate.branches) < num_separate


def replaced(samples: Sequence[TrainingSample], row: int, **changes: Any) -> list[TrainingSample]:
    return [replace(sample, **changes) if number == row else sample for number, sample in enumerate(samples)]


FAULTS: dict[str, tuple[Any, float]] = {
    "a row twice": (lambda rows: [*rows, rows[1]], 8 / 11),
    "another token drawn": (lambda rows: replaced(rows, 1, response_ids=[59, *rows[1].response_ids[1:]]), 5 / 8),
    "another token read": (lambda rows: replaced(rows, 1, prompt_ids=[19, *rows[1].prompt_ids[1:]]), 5 / 8),
    "a result in the loss": (lambda rows: replaced(rows, 1, loss_mask=[1] * 5), 8 / 10),
    "log-probs of others": (lambda rows: replaced(rows, 1, log_probs=[0.5, *(rows[1].log_probs or [])[1:]]), 7 / 8),
}


@pytest.mark.parametrize(("fault", "share"), FAULTS.values(), ids=list(FAULTS))
def test_certificate_detects_altered_tokens(fault: Any, share: float):
    rows = fault(build_recorded_trajectory(SessionRecord(turns=compacting()), 1.0, ID).samples)
    assert create_certificate(rows, compacting()).exact_share == pytest.approx(share)


@pytest.mark.parametrize("fault", [FAULTS[name][0] for name in list(FAULTS)[:4]])
def test_gradients_detect_same_faults(fault: Any):
    rows = fault(build_recorded_trajectory(SessionRecord(turns=compacting()), 1.0, ID).samples)
    assert difference(gradients(rows, share=True)[0], gradients(separate(compacting()), share=False)[0]) > 1e-3


@pytest.mark.parametrize(
    ("messages", "reason"), [(said("a"), "rendered"), (said("A, edited"), "edited"), (said(), "new_context")]
)
def test_certificate_reports_reason_for_row_start(messages: Any, reason: str):
    """The second prompt does not go on with the tokens of the first answer."""
    turns = [turn([*SYSTEM, 40], [50], 0, said(), "a"), turn([*SYSTEM, 40, 39], [51], 1, messages)]
    certificate = build_recorded_trajectory(SessionRecord(turns=turns), 1.0, ID).certificate
    assert certificate is not None and certificate.new_rows == {reason: 1}


def test_masked_tokens_have_reason():
    """A repeated request, an answer of another temperature and one that was never complete."""
    lost, again = turn([1], [50, 51], 0), replace(turn([1], [52], 5), request=repr(([1], 0)))
    cold = replace(turn([1, 52, 2], [53, 54, 55], 6), temperature=0.0)
    record = SessionRecord(turns=[lost, again, cold], num_admitted=4, num_answered=3)
    trajectory = build_recorded_trajectory(record, 1.0, ID, temperature=1.0)
    certificate = trajectory.certificate
    assert certificate is not None
    reasons = {"repeated_request": 2, "other_temperature": 3, "unfinished_answers": 1}
    assert (certificate.num_drawn, certificate.num_trained, certificate.not_trained) == (6, 1, reasons)
    assert compute_certificate_metrics([certificate])["tokens/trained_share"] == pytest.approx(1 / 6)

    failed = build_recorded_trajectory(record, 1.0, ID, 1.0, Failure("environment", "the harness hung"))
    assert failed.certificate is not None and failed.certificate.not_trained["failed_trajectory"] == 4
    assert (failed.certificate.num_trained, failed.reward, failed.stop_reason) == (0, 0.0, "error")


def test_trajectories_file_rows_have_certificate():
    trajectory = build_recorded_trajectory(SessionRecord(turns=compacting()), 1.0, ID)
    rows = build_trajectory_rows(group_trajectories([trajectory]), build_character_tokenizer())
    expected = trajectory.certificate
    assert expected is not None
    assert [row["certificate"] for row in rows] == [expected.to_json()] * 2
    assert expected.to_json()["branches"] == [[None, 0], [0, len(SYSTEM)]]
    assert compute_certificate_metrics([expected])["tokens/exact_share"] == 1.0
