"""Constrained decoding with llguidance: computes the permitted next tokens. Independent of models and rows.

A constraint is compiled once, in a separate thread that blocks neither the event loop nor the engine; every completion
gets a copy of its initial state. llguidance bounds the work of compilation and of each token (fuel, items, states);
beyond that a completion fails without affecting others.

V is the model's vocabulary.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.constraints import WHITESPACE, Constraint, ConstraintFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64
"""Maximum number of cached compiled constraints; the least recently used are evicted."""

MOST_SPACE = 32
"""Maximum consecutive white-space tokens if others are permitted. Models, especially small ones, may generate endless
white space, and the library bounds the length of a piece, not the number of pieces.
"""

_SPACES = "\u0120\u010a\u0109\u010d\u2581 \n\t\r"
"""Characters for white space in token names of byte-level vocabularies and SentencePiece."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def find_unsupported_reason(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return why constraints are unsupported with this tokenizer; None if supported."""
    if find_spec("llguidance") is None:
        return "constrained decoding needs the package llguidance; install the extra skyrl-train[constrained]"
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return f"constrained decoding needs a fast tokenizer; the model's tokenizer is a {type(tokenizer).__name__}"
    return None


class AnswerMatcher:
    """State of one constrained answer.

    Args:
        matcher: state after the tokens so far.
        vocab_size: V.
        eos_ids: tokens that may end a complete response.
        spaces: [V] bool, tokens of only white space.
        num_spaces: number of such tokens at the end so far.
    """

    def __init__(
        self, matcher: "LLMatcher", vocab_size: int, eos_ids: frozenset[int], spaces: np.ndarray, num_spaces: int = 0
    ):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._spaces = spaces
        self._num_spaces = num_spaces

    def compute_allowed(self, drafts: np.ndarray) -> np.ndarray:
        """Return [T + 1, V] bool: permitted tokens at the next position and after each of T drafts. All True after a
        draft that ends the completion or is not permitted: nothing is accepted there.
        """
        masks = np.ones((len(drafts) + 1, self._vocab_size), np.bool_)
        masks[0] = self._mask(self._num_spaces)
        num_consumed, num_spaces = 0, self._num_spaces
        for number, draft in enumerate(drafts.tolist(), 1):
            # The matcher does not count the end of a complete response and cannot roll it back.
            if draft in self._eos_ids or not masks[number - 1, draft] or not self._matcher.consume_token(draft):
                break
            num_consumed += 1
            num_spaces = num_spaces + 1 if self._spaces[draft] else 0
            masks[number] = self._mask(num_spaces)
        if num_consumed:
            self._matcher.rollback(num_consumed)
        return masks

    def _mask(self, num_spaces: int) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # A failed matcher would permit only the end, and make an unfinished response look complete.
        self._raise_if_failed()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if not mask.any():
            raise ConstraintFailed("the constraint requires text that the model's vocabulary has no token for")
        if num_spaces >= MOST_SPACE and (others := mask & ~self._spaces).any():
            return others
        return mask

    def push(self, token: int) -> bool:
        """Advance by the next token. Returns whether it completes the response."""
        self._matcher.consume_token(token)
        self._raise_if_failed()
        self._num_spaces = self._num_spaces + 1 if self._spaces[token] else 0
        return token in self._eos_ids or (not self._eos_ids and self._matcher.is_stopped())

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(f"the constraint cannot be continued: {_get_reason(self._matcher.get_error())}")


class ConstraintCompiler:
    """Compiler of constraints for one tokenizer.

    Args:
        vocab_size: V; the tokenizer may have fewer tokens.
        eos_ids: tokens that end a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self.unsupported = find_unsupported_reason(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._ll_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    async def build_matcher(self, constraint: Constraint, answer: Sequence[int]) -> AnswerMatcher:
        """Build the matcher of a completion, given its tokens so far.

        Raises:
            UnsupportedByEngine: the library is missing, or the tokenizer is not a fast one.
            ValueError: the constraint cannot be compiled, or the tokens so far violate it.
        """
        if self.unsupported is not None:
            raise UnsupportedByEngine(self.unsupported)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._build_matcher, constraint, answer)

    def _build_matcher(self, constraint: Constraint, answer: Sequence[int]) -> AnswerMatcher:
        # Copies share the lexer's tables under the library's locks; each copy belongs to one row.
        matcher = self._compile(constraint).deep_copy()
        if not matcher.consume_tokens(list(answer)):
            raise ValueError(
                f"the last {len(answer)} tokens of the prompt (num_answer_tokens) contradict the constraint: "
                f"{_get_reason(matcher.get_error())}"
            )
        num_spaces = sum(1 for _ in takewhile(lambda token: self._spaces[token], reversed(answer)))
        return AnswerMatcher(matcher, self._vocab_size, self._eos_ids, self._spaces, num_spaces)

    def _compile(self, constraint: Constraint) -> "LLMatcher":
        from llguidance import LLMatcher

        known = self._compiled.get(constraint)
        if known is not None:
            self._compiled.move_to_end(constraint)
            return known
        if self._ll_tokenizer is None:
            self._ll_tokenizer = _build_ll_tokenizer(self._tokenizer, self._vocab_size, sorted(self._eos_ids))
        if constraint.kind == "json_schema":
            try:
                grammar = LLMatcher.grammar_from_json_schema(
                    constraint.text, overrides={"whitespace_pattern": WHITESPACE}
                )
            except ValueError as error:
                raise ValueError(f"the constraint is not a valid JSON schema: {_get_reason(str(error))}") from error
        else:
            grammar = LLMatcher.grammar_from_lark(constraint.text)
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        # The first mask also builds shared tables, outside of the engine's thread.
        matcher.compute_bitmask()  # detects unsatisfiable constraints
        if matcher.is_error():
            raise ValueError(
                f"the {constraint.kind} of the constraint cannot be used: {_get_reason(matcher.get_error())}"
            )
        self._compiled[constraint] = matcher
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _spaces(self) -> np.ndarray:
        """[V] bool, tokens of only white space."""
        spaces = np.zeros(self._vocab_size, np.bool_)
        num_known = min(self._vocab_size, len(self._tokenizer))
        names: list[str | None] = self._tokenizer.convert_ids_to_tokens(list(range(num_known)))  # pyright: ignore
        bytes_of_space = {f"<0x{ord(each):02X}>" for each in " \n\t\r"}
        spaces[:num_known] = [bool(name) and (not name.strip(_SPACES) or name in bytes_of_space) for name in names]
        return spaces

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _build_ll_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: list[int]) -> "LLTokenizer":
    import llguidance
    import llguidance.hf

    size = max(vocab_size, len(tokenizer))
    end: Any = eos_ids or None
    try:
        return llguidance.hf.from_tokenizer(tokenizer, size, eos_token=end)  # pyright: ignore[reportArgumentType]
    except ValueError:  # neither byte-level nor byte fallback: each token has its own text
        words = _TokenBytes(tokenizer, eos_ids[0] if eos_ids else 0)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), n_vocab=size, eos_token=end)


class _TokenBytes:
    """Tokenizer in llguidance's format: the bytes of each token. Partial characters are marked as special tokens, which
    match no text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_id: int):
        texts = [str(tokenizer.decode([token])) for token in range(len(tokenizer))]
        special = set(tokenizer.all_special_ids) | {token for token, text in enumerate(texts) if _INCOMPLETE in text}
        self.eos_token_id = eos_id
        self.special_token_ids = sorted(special)
        self.tokens = [
            str(tokenizer.convert_ids_to_tokens(token)).encode() if token in special else text.encode()
            for token, text in enumerate(texts)
        ]
        self._encode: Callable[..., Any] = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._encode(text, add_special_tokens=False)["input_ids"]


def _get_reason(text: str) -> str:
    """Return the first lines of a message, without the library's state dump."""
    return " ".join(text.split("\n\n")[0].split())[:300] or "no reason given"
