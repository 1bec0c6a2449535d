"""Requests of the native engine, and their validated sampling settings."""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from skyrl_gym.suggestions import did_you_mean
from skyrl_train.inference_engines.constraints import Constraint
from skyrl_train.inference_engines.native.sampling import compute_random_key
from skyrl_train.inference_engines.native.stop_strings import Decode
from skyrl_train.inference_engines.request import Completion, OnTokens, SamplingKeywords, build_top_log_probs

if TYPE_CHECKING:  # not needed by servers and other engines that read requests
    from skyrl_train.inference_engines.native.constrained import AnswerMatcher
    from skyrl_train.inference_engines.native.lora import Lora

SeedPair = tuple[int, int]
"""Seed and index; the index distinguishes requests with the same seed."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

MAX_TOP = 20
"""Maximum number of most likely tokens to return at each position."""

MAX_BIAS = 100.0

NO_LORA = -1
"""The slot of rows without adapter."""


@dataclass(frozen=True, kw_only=True)
class EngineSamplingParams:
    """Validated sampling settings; built from keywords by `from_dict`."""

    max_tokens: int | None = None
    """Maximum number of new tokens; None: until the context is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each occurrence in the completion."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token that occurs in the completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and values added to their logits."""
    constraint: Constraint | None = None
    """Schema or grammar of the entire completion."""
    num_answer_tokens: int = 0
    """Number of tokens at the end of the prompt that belong to the completion, for `constraint`, `frequency_penalty`
    and `presence_penalty`.
    """
    stop: tuple[str, ...] = ()
    """Texts that end the completion; they stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Minimum number of tokens before stop tokens (which are masked) or stop strings may end the completion."""
    seed: int | None = None
    logprobs: int | None = 0
    """0: log-prob of the sampled token. K: also of the K most likely tokens at its position. None: no log-probs."""
    prompt_logprobs: int | None = None
    """0: log-prob of every prompt token but the first. K: also of the K most likely tokens at its position. None: no
    log-probs.
    """
    skip_special_tokens: bool = True
    """Omit special tokens from the response text; ids always include them."""
    return_kept_tokens: bool = False
    """Return with each token the tokens kept by truncation, and the log-prob over them. `top_k` bounds their number."""

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None")
        self._check("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a positive number")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "-1 or 0 (off), or at least 1")
        self._check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a positive number; 1 is off")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        self._check("stop", all(self.stop), "a list without empty strings")
        for name in ("frequency_penalty", "presence_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "from -2 to 2; 0 is off")
        biased = all(abs(value) <= MAX_BIAS for _, value in self.logit_bias)  # false for NaN
        self._check("logit_bias", biased, f"token ids with values from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        self._check("num_answer_tokens", self.num_answer_tokens >= 0, "at least 0")
        most = MAX_TOP if self.logprobs is None else self.logprobs
        self._check(
            "logprobs", 0 <= most <= MAX_TOP, f"0 (the token's own), up to {MAX_TOP} most likely tokens, or None"
        )
        top = self.prompt_logprobs
        self._check("prompt_logprobs", top is None or top >= 0, "0, a number of most likely tokens, or None")
        if self.return_kept_tokens:
            self._check(
                "top_k", self.top_k >= 1, "at least 1 with return_kept_tokens, because it bounds the returned sets"
            )
            self._check(
                "temperature", not self.is_greedy, "above 0 with return_kept_tokens: greedy decoding does not sample"
            )
            penalty = self.repetition_penalty
            self._check("repetition_penalty", penalty == 1, "1 with return_kept_tokens: it changes kept logits")
            for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
                self._check(name, not getattr(self, name), "unset with return_kept_tokens: it changes kept logits")
            self._check("logprobs", not self.logprobs, "0 or None with return_kept_tokens")
        if self.max_tokens is not None:
            self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"sampling parameter {name} must be {rule}; got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True if `frequency_penalty` or `presence_penalty` is in use."""
        return bool(self.frequency_penalty or self.presence_penalty)

    @property
    def depends_on_answer(self) -> bool:
        """True if a token depends on which earlier tokens belong to the completion. Only engines that support
        `num_answer_tokens` can continue such a completion; others restart it.
        """
        return self.constraint is not None or self.has_penalties

    @classmethod
    def from_dict(cls, given: SamplingKeywords | None) -> "EngineSamplingParams":
        """Parse and validate engine keywords. `stop` may be one string.

        Raises:
            ValueError: an unknown keyword, a wrong type or a value out of range; names the keyword, value and rule.
        """
        values = dict(given or {})
        for name, value in values.items():
            values[name] = _check_request(name, value)
        return cls(**values)


def _parse_number(value: object) -> float | None:
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def _parse_integer(value: object) -> int | None:
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def _parse_boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _parse_texts(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return (value,)
    texts = tuple(value) if isinstance(value, list | tuple) else None
    return texts if texts is not None and all(isinstance(text, str) for text in texts) else None


def _parse_integers(value: object) -> tuple[int, ...] | None:
    ids = tuple(map(_parse_integer, value)) if isinstance(value, list | tuple) else (None,)
    return None if None in ids else ids  # pyright: ignore[reportReturnType]


def _parse_biases(value: object) -> tuple[tuple[int, float], ...] | None:
    if not isinstance(value, Mapping | tuple | list):
        return None
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
    read = [
        (_parse_integer(pair[0]), _parse_number(pair[1]))
        for pair in pairs
        if isinstance(pair, tuple | list) and len(pair) == 2
    ]
    checked = [(token, bias) for token, bias in read if token is not None and bias is not None]
    return tuple(checked) if len(checked) == len(pairs) else None


_KINDS = {
    "max_tokens": (_parse_integer, "an integer"),
    "temperature": (_parse_number, "a number"),
    "top_p": (_parse_number, "a number"),
    "top_k": (_parse_integer, "an integer"),
    "min_p": (_parse_number, "a number"),
    "repetition_penalty": (_parse_number, "a number"),
    "frequency_penalty": (_parse_number, "a number"),
    "presence_penalty": (_parse_number, "a number"),
    "logit_bias": (_parse_biases, "numbers by token id"),
    "constraint": (Constraint.parse, "a JSON schema or a grammar"),
    "num_answer_tokens": (_parse_integer, "an integer"),
    "stop": (_parse_texts, "a string or a list of strings"),
    "stop_token_ids": (_parse_integers, "a list of integers"),
    "ignore_eos": (_parse_boolean, "true or false"),
    "min_tokens": (_parse_integer, "an integer"),
    "seed": (_parse_integer, "an integer"),
    "logprobs": (_parse_integer, "an integer"),
    "prompt_logprobs": (_parse_integer, "an integer"),
    "skip_special_tokens": (_parse_boolean, "true or false"),
    "return_kept_tokens": (_parse_boolean, "true or false"),
}
_NONE_IS_DEFAULT = {"stop": (), "stop_token_ids": (), "logit_bias": ()}
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "constraint")


def _check_request(name: str, value: object) -> object:
    if name not in _KINDS:
        hint = did_you_mean(name, _KINDS)
        raise ValueError(f"unknown sampling parameter {name}={value!r}; {hint}")
    if value is None and name in _NONE_IS_DEFAULT:
        return _NONE_IS_DEFAULT[name]
    if value is None and name in _MAY_BE_NONE:
        return None
    convert, kind = _KINDS[name]
    converted = convert(value)
    if converted is None:
        raise ValueError(f"sampling parameter {name} must be {kind}; got {value!r}")
    return converted


def split_seed(given: SamplingKeywords) -> tuple[EngineSamplingParams, SeedPair | None]:
    """Check the sampling settings of a request, whose `seed` may be a number or a [seed, index] pair.

    Returns:
        the settings, and the pair (None without a seed).

    Raises:
        ValueError: an unknown keyword, or a value out of range.
    """
    pair = given.get("seed")
    if not isinstance(pair, list | tuple):
        params = EngineSamplingParams.from_dict(given)
        return params, None if params.seed is None else (params.seed, 0)
    numbers_of_pair = _parse_integers(pair)
    if numbers_of_pair is None or len(numbers_of_pair) != 2:
        raise ValueError(f"sampling parameter seed must be an integer or a [seed, index] pair; got {pair!r}")
    seed, index = numbers_of_pair
    return EngineSamplingParams.from_dict({**given, "seed": None}), (seed, index)


def select_requested(
    completion: Completion,
    params: EngineSamplingParams,
    decode: Callable[[list[int], bool], str],
    count_cached_tokens: bool = False,
) -> Completion:
    """Return a completion with its text and only the values requested by `params`.

    Args:
        decode: (token ids, skip special tokens) -> text.
    """
    num_top = params.prompt_logprobs or 0
    return replace(
        completion,
        text=decode(completion.token_ids, params.skip_special_tokens),
        log_probs=None if params.logprobs is None else completion.log_probs,
        top=(completion.top or build_top_log_probs([], params.logprobs)) if params.logprobs else None,
        prompt_log_probs=None if params.prompt_logprobs is None else completion.prompt_log_probs or [],
        # A prompt of one token has no scored position.
        prompt_top=(completion.prompt_top or build_top_log_probs([], num_top)) if num_top else None,
        num_cached_prompt_tokens=completion.num_cached_prompt_tokens if count_cached_tokens else None,
        drafts=completion.drafts if count_cached_tokens else None,
    )


@dataclass(frozen=True, kw_only=True)
class PromptScoring:
    """Settings of prompt scoring."""

    temperature: float = 1.0
    num_top: int = 0
    """Number of most likely tokens per position, in addition to the prompt's own token."""
    targets: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
    """C additional tokens to score: ascending positions, counted from the second prompt token, and ids; [C] int64 each.
    """


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Log-probs of every prompt token but the first, and of the most likely tokens at its position."""

    log_probs: np.ndarray
    """[P - 1] float32"""
    top_ids: np.ndarray
    """[P - 1, k] int64, most likely first"""
    top_log_probs: np.ndarray
    """[P - 1, k] float32"""
    target_log_probs: np.ndarray
    """[C] float32, of `PromptScoring.targets`"""


@dataclass(eq=False)
class Request:
    """One prompt to continue.

    Args:
        prompt: [P] token ids, int64
        seed: (seed, index); a token's random number is derived from them and its position
        lora: adapter that generates the completion
        scoring: scoring of the prompt; None: according to `params.prompt_logprobs`, at the completion's temperature
        group: fair-scheduling group (`waiting.py`); None: no group
        decode: token ids to the text that is searched for stop strings; None: the engine's, without special tokens
        matcher: state of `params.constraint` after the completion's tokens at the end of the prompt
        on_tokens: called in the engine's thread with new tokens, except the last ones
    """

    prompt: np.ndarray
    params: EngineSamplingParams
    seed: SeedPair
    lora: "Lora | None" = None
    scoring: PromptScoring | None = None
    group: str | None = None
    decode: Decode | None = None
    matcher: "AnswerMatcher | None" = None
    on_tokens: OnTokens | None = None
    num_handed_out: int = field(default=0, init=False)
    """Number of tokens sent to `on_tokens`."""
    prompt_scores: PromptScores | None = field(default=None, init=False)
    """Result of `scoring`, set when the prompt is computed."""
    num_chunked: int = field(default=0, init=False)
    """Number of prompt tokens computed in chunks while it waited."""
    key: np.uint64 = field(init=False)
    prefix: bytes = field(init=False, repr=False)
    """Prompt without its last token: the part that is computed before the first decoding step and can be shared."""

    def __post_init__(self) -> None:
        if (self.matcher is None) != (self.params.constraint is None):
            raise ValueError("a request with a constraint needs a matcher (ConstraintCompiler.matcher)")
        if self.params.num_answer_tokens > len(self.prompt):
            raise ValueError(
                f"sampling parameter num_answer_tokens={self.params.num_answer_tokens} must be at most the "
                f"{len(self.prompt)} tokens of the prompt, because it counts the last ones"
            )
        self.key = compute_random_key(*self.seed)
        self.prefix = self.prompt[:-1].tobytes()
        if self.scoring is None and self.params.prompt_logprobs is not None:
            temperature = 1.0 if self.params.is_greedy else self.params.temperature
            self.scoring = PromptScoring(temperature=temperature, num_top=self.params.prompt_logprobs)

    @property
    def lora_serial(self) -> int:
        """Serial of the adapter that computes further keys and values; 0: none."""
        return 0 if self.lora is None else self.lora.serial

    @property
    def lora_slot(self) -> int:
        """Slot of the adapter; `NO_LORA`: none."""
        return NO_LORA if self.lora is None else self.lora.slot
