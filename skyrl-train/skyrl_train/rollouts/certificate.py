"""Token certificates: which trained tokens of a trajectory are exactly the sampled tokens, and why others are not.
Compares training samples with the recorded completions, independent of how the samples were built."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from skyrl_train.rollouts.types import TrainingSample


class SampledCompletion(Protocol):
    """One sampled completion: its prompt, its tokens and their log-probs."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def response_ids(self) -> list[int]: ...

    @property
    def log_probs(self) -> list[float]: ...


@dataclass(frozen=True)
class Branch:
    """Position of a row in the tree of a trajectory's rows."""

    parent: int | None
    """Earlier row that it has most tokens in common with; None if there is none."""
    start: int
    """Tokens that the two have in common: the row's own begin there."""


@dataclass(frozen=True)
class TokenCertificate:
    """Token-exactness certificate of a trajectory."""

    num_drawn: int
    """Tokens of all completions, including unused ones."""
    num_trained: int
    """Tokens with loss mask 1."""
    num_exact: int
    """Trained tokens that stand behind exactly the tokens that the model read when it drew them, once, with the
    log-prob of that moment."""
    not_trained: dict[str, int] = field(default_factory=dict)
    """Drawn tokens without loss, by reason; `unfinished_answers` counts answers, whose tokens are not known."""
    branches: list[Branch] = field(default_factory=list)
    """Place of each row in the tree."""
    new_rows: dict[str, int] = field(default_factory=dict)
    """Reasons why rows after the first began."""

    @property
    def exact_share(self) -> float:
        """Fraction of trained tokens that are exact; 1 if no token trains."""
        return self.num_exact / self.num_trained if self.num_trained else 1.0

    def to_json(self) -> dict[str, object]:
        """Return the certificate as JSON values for the trajectory's record."""
        return {
            "drawn": self.num_drawn,
            "trained": self.num_trained,
            "exact": self.num_exact,
            "not_trained": self.not_trained,
            "new_rows": self.new_rows,
            "branches": [[branch.parent, branch.start] for branch in self.branches],
        }


def build_token_tree(samples: Sequence["TrainingSample"]) -> list[Branch]:
    """Return the position of each row in the tree: rows with a common beginning form branches, a later row branching
    off an earlier one."""
    rows = [np.asarray(sample.prompt_ids + sample.response_ids) for sample in samples]
    branches: list[Branch] = []
    for number, row in enumerate(rows):
        shared = [_count_common(row, earlier) for earlier in rows[:number]]
        start = max(shared, default=0)
        branches.append(Branch(shared.index(start) if start else None, start))
    return branches


def create_certificate(
    samples: Sequence["TrainingSample"],
    answers: Sequence[SampledCompletion],
    *,
    num_drawn: int | None = None,
    not_trained: Mapping[str, int] | None = None,
    new_rows: Mapping[str, int] | None = None,
) -> TokenCertificate:
    """Compare samples with the completions that they were built from.

    Args:
        num_drawn: number of sampled tokens, including unused completions; None: the tokens of `answers`.
        not_trained: known reasons for completions that are not in `answers` or that are excluded from the loss.
    """
    of_answers = sum(len(answer.response_ids) for answer in answers)
    num_trained = sum(sum(map(bool, sample.loss_mask)) for sample in samples)
    counts = [np.zeros(len(sample.response_ids), np.int64) for sample in samples]
    for answer in answers:
        _count(answer, samples, counts)
    num_exact = sum(
        int(((count == 1) & (np.asarray(sample.loss_mask) != 0)).sum())
        for sample, count in zip(samples, counts, strict=True)
    )
    return TokenCertificate(
        num_drawn=of_answers if num_drawn is None else num_drawn,
        num_trained=num_trained,
        num_exact=num_exact,
        not_trained={reason: count for reason, count in (not_trained or {}).items() if count},
        branches=build_token_tree(samples),
        new_rows={reason: count for reason, count in (new_rows or {}).items() if count},
    )


def compute_certificate_metrics(certificates: Sequence[TokenCertificate]) -> dict[str, float]:
    """Compute `tokens/exact_share` of the trained tokens, `tokens/trained_share` of the sampled tokens, rows per
    trajectory, and the count of each reason."""
    if not certificates:
        return {}
    drawn, trained, exact = (
        sum(getattr(each, name) for each in certificates) for name in ("num_drawn", "num_trained", "num_exact")
    )
    metrics = {
        "tokens/exact_share": exact / trained if trained else 1.0,
        "tokens/trained_share": trained / drawn if drawn else 0.0,
        "tokens/rows_per_trajectory": sum(len(each.branches) for each in certificates) / len(certificates),
    }
    for kind in ("not_trained", "new_rows"):
        total: Counter[str] = Counter()
        for each in certificates:
            total.update(getattr(each, kind))
        metrics |= {f"tokens/{kind}/{reason}": float(count) for reason, count in total.items()}
    return metrics


def _count(answer: SampledCompletion, samples: Sequence["TrainingSample"], counts: list[np.ndarray]) -> None:
    """Add 1 to each token of a sample that belongs to this completion, in the first sample where its tokens train."""
    for sample, count in zip(samples, counts, strict=True):
        start = len(answer.prompt_ids) - len(sample.prompt_ids)
        end = start + len(answer.response_ids)
        if start < 0 or end > len(sample.response_ids) or not any(sample.loss_mask[start:end]):
            continue
        if sample.response_ids[start:end] != answer.response_ids or count[start:end].any():
            continue
        if sample.log_probs is not None and sample.log_probs[start:end] != answer.log_probs:
            continue
        if sample.prompt_ids + sample.response_ids[:start] == answer.prompt_ids:
            count[start:end] += 1
            return


def _count_common(left: np.ndarray, right: np.ndarray) -> int:
    num_compared = min(len(left), len(right))
    differs = left[:num_compared] != right[:num_compared]
    return int(differs.argmax()) if differs.any() else num_compared
