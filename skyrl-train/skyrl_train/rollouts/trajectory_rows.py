"""Trajectories as readable rows for `RunFolder.write_trajectories`, and per-token training values for
`RunFolder.write_token_columns`."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from skyrl_train.rollouts.joining import merge_all_turns
from skyrl_train.rollouts.types import Failure, TrainingSample, Trajectory, TrajectoryGroup
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.token_columns import encode_columns
from skyrl_train.utils.tracking import SampleRow

_REPLACEMENT = "\ufffd"
_MAX_TOKENS_OF_A_CHARACTER = 4
_SENTENCEPIECE_SPACE = "\u2581"


class Detokenizer(Protocol):
    """Interface of a tokenizer required by this module; implemented by transformers' tokenizers."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: int | list[int], /) -> Any: ...


def build_trajectory_rows(groups: Sequence[TrajectoryGroup], tokenizer: Detokenizer) -> list[dict[str, object]]:
    """Return one JSON-ready row per trajectory (or per turn, with step-wise trajectories), in order:

    uid, sample         prompt, and index of the sample
    prompt, response    text including special tokens
    reward              the sum over the row
    stop_reason, failure ({kind, message} or null)
    env_class           id of the environment; empty if unknown
    prompt_ids
    tokens              of the response, one entry per token: text, ids, loss_mask, log_probs (or null), rewards,
                        weight_versions (or null)
    step, is_last_step  with step-wise trajectories: index of the row within its trajectory, and whether it is the last
    certificate         of a recorded agent (`TokenCertificate.to_json`), equal on all rows of a trajectory
    program_output      end of the output of an agent's program, on the last row of its trajectory
    """
    pieces = _TokenTexts(tokenizer)
    return [
        _build_row(group, trajectory, step, sample, tokenizer, pieces)
        for group in groups
        for trajectory in group.trajectories
        for step, sample in enumerate(trajectory.samples)
    ]


def sample_table(trajectories: Sequence[Trajectory], tokenizer: Detokenizer) -> list[SampleRow]:
    """Return prompt, response and reward of whole trajectories, for `Tracking.log_samples`."""
    samples = [merge_all_turns(each) for each in trajectories]
    return [
        (tokenizer.decode(sample.prompt_ids), tokenizer.decode(sample.response_ids), each.reward)
        for each, sample in zip(trajectories, samples, strict=True)
    ]


def _build_row(
    group: TrajectoryGroup,
    trajectory: Trajectory,
    step: int,
    sample: TrainingSample,
    tokenizer: Detokenizer,
    pieces: "_TokenTexts",
) -> dict[str, object]:
    log_probs = sample.log_probs
    row: dict[str, object] = {
        "uid": group.uid,
        "sample": trajectory.id.repetition_id,
        "prompt": tokenizer.decode(sample.prompt_ids, skip_special_tokens=False),
        "response": tokenizer.decode(sample.response_ids, skip_special_tokens=False),
        "reward": sample.reward,
        "stop_reason": trajectory.stop_reason,
        "failure": _build_failure_row(trajectory.failure),
        "env_class": trajectory.env_class,
        "prompt_ids": list(sample.prompt_ids),
        "tokens": {
            "text": pieces.of(sample.response_ids),
            "ids": list(sample.response_ids),
            "loss_mask": list(sample.loss_mask),
            "log_probs": None if log_probs is None else [_format_short(value) for value in log_probs],
            "rewards": list(sample.rewards),
            "weight_versions": sample.weight_versions,
        },
    }
    if trajectory.is_step_wise:
        row |= {"step": step, "is_last_step": sample is trajectory.samples[-1]}
    if trajectory.certificate is not None:
        row["certificate"] = trajectory.certificate.to_json()
    if trajectory.program_output is not None and sample is trajectory.samples[-1]:
        row["program_output"] = trajectory.program_output
    return row


def iter_token_column_rows(batch: TrainingInputBatch) -> Iterator[dict[str, str]]:
    """Yield for each trained row of a batch its `uid` and the training values of each response token
    (`utils/token_columns.py`), in the order of `build_trajectory_rows`:

    trainer_log_probs   of the policy before the step
    entropies           of the policy in the row's first training forward
    advantages
    trained             1 on tokens in the loss: in the row's loss mask and not removed by a filter
    """
    lengths = batch.tensor("response_mask").sum(dim=1).tolist()
    trained = batch.tensor("loss_mask").cpu().numpy() != 0
    columns = {"trained": trained}
    for name, source in {"trainer_log_probs": "action_log_probs", "entropies": "entropies"}.items():
        if (column := batch.get(source)) is not None:
            values = column.detach().cpu().float().numpy()
            # The training forward leaves 0 outside the loss mask; other forwards tell all tokens.
            columns[name] = np.where(trained | (values != 0), values, np.nan)
    if (advantages := batch.get("advantages")) is not None:
        columns["advantages"] = np.where(trained, advantages.detach().cpu().float().numpy(), np.nan)
    for index, (uid, length) in enumerate(zip(batch.metadata["uids"], lengths, strict=True)):
        yield {"uid": str(uid)} | encode_columns({name: column[index, :length] for name, column in columns.items()})


class _TokenTexts:
    """Text of each token, such that the concatenation (nearly) equals the decoded text. Caches all tokens."""

    def __init__(self, tokenizer: Detokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return one text per token. A character made of several tokens (e.g. an emoji) is attributed to the last of
        them."""
        texts = [self._get_text(token) for token in ids]
        index = 0
        while index < len(texts):
            if _REPLACEMENT in texts[index]:
                index = self._join_character(ids, texts, index)
            index += 1
        return texts

    def _get_text(self, token: int) -> str:
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            name = self._tokenizer.convert_ids_to_tokens(token)
            # SentencePiece decoders drop the space before the first word, and here every token is a first one.
            if isinstance(name, str) and name.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
                text = " " + text
            self._known[token] = text
        return self._known[token]

    def _join_character(self, ids: Sequence[int], texts: list[str], start: int) -> int:
        """Attribute the character whose first bytes are token `start` to its last token; return that token's index."""
        for end in range(start + 2, min(start + _MAX_TOKENS_OF_A_CHARACTER, len(ids)) + 1):
            joined = self._tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            if _REPLACEMENT not in joined:
                texts[start:end] = [""] * (end - start - 1) + [joined]
                return end - 1
        return start


def _build_failure_row(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"kind": failure.kind, "message": failure.message}


def _format_short(value: float) -> float:
    """Return a float32 with the fewest digits that identify it exactly."""
    return float(f"{value:.9g}")
