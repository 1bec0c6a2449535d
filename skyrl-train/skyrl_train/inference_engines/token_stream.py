"""Tokens of a streamed request on their way to its caller: each once, whichever engines compute them.

Of engines that do not stream, the answer is asked for in pieces: calls with a small budget, each of which ends like an
interrupted one and is continued.
"""

from dataclasses import dataclass, field

from skyrl_train.inference_engines.base import OnTokens, SamplingKeywords, TokenDelta, TopLogProbs
from skyrl_train.inference_engines.request import Completion, join_deltas

FIRST_PIECE = 16
LARGEST_PIECE = 256
"""Tokens of the pieces of an answer: each twice as long as the one before, up to the largest. Engines have the prompt
and the pieces so far in their prefix cache."""


@dataclass(eq=False)
class TokenStream:
    """State of a streamed request.

    Args:
        on_tokens: the caller's.
    """

    on_tokens: OnTokens
    is_held: bool = False
    """True while nothing may be handed out: interrupted, the answer would be begun anew."""
    deltas: list[TokenDelta] = field(default_factory=list)
    """Tokens of the present call."""
    num_given: int = 0
    """How many of `deltas` the caller has."""
    is_border_passed: bool = False
    """True once no stop string may begin before the present call and end in it."""
    piece: int | None = None
    """Budget of the present call, where that is less than the rest of the answer's."""
    _next_piece: int = FIRST_PIECE

    def end_call(self) -> None:
        """Forget the tokens of a call that is over; what still comes of it is not heard."""
        self.deltas, self.num_given, self.is_border_passed, self.piece = [], 0, False, None

    def of_piece(self, params: SamplingKeywords) -> SamplingKeywords:
        """Return the settings of the next call to an engine that does not stream."""
        most, size = params.get("max_tokens"), self._next_piece
        if self.is_held or (most is not None and most <= size):
            return params
        self.piece, self._next_piece = size, min(2 * size, LARGEST_PIECE)
        return params | {"max_tokens": size, "min_tokens": min(size, params.get("min_tokens") or 0)}

    def is_end_of_piece(self, part: Completion) -> bool:
        """Check whether a call ended by the budget of its piece alone."""
        return part.stop_reason == "length" and len(part.token_ids) == self.piece

    def give(self) -> None:
        """Hand out what came of the present call."""
        new = self.deltas[self.num_given :]
        self.num_given = len(self.deltas)
        if new and not self.is_held:
            self.on_tokens(join_deltas(new))

    def give_rest(self, part: Completion) -> None:
        """Hand out the tokens of a call that is over, and will be continued, which the caller does not have."""
        start = sum(len(delta.token_ids) for delta in self.deltas[: self.num_given])
        if start < len(part.token_ids) and not self.is_held:
            top = part.top
            delta = TokenDelta(
                part.token_ids[start:],
                None if part.log_probs is None else part.log_probs[start:],
                part.weight_versions[start:],
                None if top is None else TopLogProbs(top.ids[start:], top.log_probs[start:]),
            )
            self.on_tokens(delta)

    def interrupted_part(self) -> Completion | None:
        """Return the tokens of a call whose engine failed, as an interrupted part of the answer; None: there are none,
        or they must be computed anew."""
        if self.is_held or not self.deltas:
            return None
        token_ids, log_probs, versions, top = join_deltas(self.deltas)
        return Completion(token_ids, "abort", versions, log_probs, top=top)
