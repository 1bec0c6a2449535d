"""Execution of a forward or forward-backward command: split into micro-batches, run one by one, merged."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tx.errors import ModelError
from tx.tinker.commands import Train
from tx.tinker.types import Datum, PassOutput, TrainingPass
from tx.tinker.wire.codec import TrainingRequest, encode_pass_output
from tx.tinker.wire.merging import merge_outputs


class PassResult(NamedTuple):
    """Result of a whole command."""

    body: bytes = b""
    """`ForwardBackwardOutput` of the wire."""
    metrics: dict[str, float] = {}  # noqa: RUF012


NOTHING = PassResult()
"""Result that is not reported."""


@dataclass(eq=False)
class RunningPass:
    """Progress of one forward or forward-backward command."""

    command: Train
    request: TrainingRequest
    parts: Sequence[list[Datum]]
    gradient_before: object = None
    """Copy of the gradient before the first part, for commands of several parts that add to it."""
    outputs: list[PassOutput] = field(default_factory=list)
    seconds: float = 0.0
    """Compute time of this command in the passes so far."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ModelError("data must have at least one datum")

    @property
    def adds_gradient(self) -> bool:
        return not self.request.forward_only

    @property
    def tokens(self) -> int:
        """Number of tokens of the next micro-batch."""
        return sum(len(datum.tokens) for datum in self.parts[len(self.outputs)])

    @property
    def done(self) -> bool:
        return len(self.outputs) == len(self.parts)

    def next_part(self) -> TrainingPass:
        request = self.request
        data = self.parts[len(self.outputs)]
        return TrainingPass(self.command.model_id, data, request.loss_fn, request.loss_config, request.forward_only)

    def result(self) -> PassResult:
        """Merge the outputs of the parts."""
        whole = merge_outputs(self.outputs, [len(part) for part in self.parts])
        return PassResult(encode_pass_output(whole), whole.metrics)
