"""Delivery of a streamed request's tokens to its caller, exactly once each, even if several engines compute them.

From engines without streaming, the completion is requested in pieces: calls with a small budget that end like
interrupted ones and are continued.
"""

from dataclasses import dataclass, field

from skyrl_train.inference_engines.base import OnTokens, SamplingKeywords, TokenDelta, TopLogProbs
from skyrl_train.inference_engines.request import Completion, join_deltas

FIRST_PIECE = 16
LARGEST_PIECE = 256
"""Smallest and largest number of tokens of a piece; lengths double. Engines have the prompt and earlier pieces in their
prefix cache.
"""


@dataclass(eq=False)
class TokenStream:
    """State of a streamed request.

    Args:
        on_tokens: the caller's callback.
    """

    on_tokens: OnTokens
    is_held: bool = False
    """True while no tokens may be delivered, because an interruption would restart the completion."""
    deltas: list[TokenDelta] = field(default_factory=list)
    """Tokens of the current call."""
    num_given: int = 0
    """Number of delivered `deltas`."""
    is_border_passed: bool = False
    """True once no stop string can begin before the current call and end in it."""
    piece: int | None = None
    """Token budget of the current call, if smaller than the remaining budget."""
    _next_piece: int = FIRST_PIECE

    def end_call(self) -> None:
        """Drop the tokens of a finished call and ignore later ones from it."""
        self.deltas, self.num_given, self.is_border_passed, self.piece = [], 0, False, None

    def build_segment_params(self, params: SamplingKeywords) -> SamplingKeywords:
        """Build the settings of the next call to an engine without streaming."""
        most, size = params.get("max_tokens"), self._next_piece
        if self.is_held or (most is not None and most <= size):
            return params
        self.piece, self._next_piece = size, min(2 * size, LARGEST_PIECE)
        return params | {"max_tokens": size, "min_tokens": min(size, params.get("min_tokens") or 0)}

    def is_end_of_segment(self, part: Completion) -> bool:
        """Return whether a call ended only because of its segment's budget."""
        return part.stop_reason == "length" and len(part.token_ids) == self.piece

    def send(self) -> None:
        """Deliver the undelivered tokens of the current call."""
        new = self.deltas[self.num_given :]
        self.num_given = len(self.deltas)
        if new and not self.is_held:
            self.on_tokens(join_deltas(new))

    def send_rest(self, part: Completion) -> None:
        """Deliver the remaining tokens of a finished call that will be continued."""
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

    def get_interrupted_part(self) -> Completion | None:
        """Return the tokens of a call to a failed engine as an interrupted part of the completion; None if empty or if
        the completion must be restarted.
        """
        if self.is_held or not self.deltas:
            return None
        token_ids, log_probs, versions, top = join_deltas(self.deltas)
        return Completion(token_ids, "abort", versions, log_probs, top=top)
