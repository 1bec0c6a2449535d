"""Explanations of an engine's log-probs: each known mistake is made on the trainer's own logits, and the one that gives
the engine's numbers is the explanation.

Shapes: N tokens, V words, P tokens of a row so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from skyrl_inspect.mismatch.answers import Answers, Sampling
from skyrl_inspect.mismatch.scoring import Reference
from skyrl_train.inference_engines.native.sampling import SamplingBatch, apply_repetition_penalty, truncate

_MAX_TOKENS = 256
"""Logits of so many tokens are looked at: 150 MB for a vocabulary of 150,000."""

Kind = Literal["temperature", "truncation", "penalty", "penalty and truncation"]


@dataclass(frozen=True)
class Explanation:
    """The engine's numbers are the trainer's, but for this."""

    kind: Kind
    left: float
    """Mean difference that it does not explain, without the largest twentieth (rounding decides which tokens stand at
    the edge of a truncation)."""

    temperature: float | None = None
    """`temperature`: the one that the engine's numbers belong to."""


@dataclass(frozen=True)
class _Tokens:
    """Some tokens of a cell."""

    logits: torch.Tensor
    """[N, V], of the trainer."""

    labels: torch.Tensor
    """[N]"""

    seen: torch.Tensor
    """[N, P]: prompt and answer up to each token, filled up with the prompt's first token."""

    rollout: torch.Tensor
    """[N]: what the engine said."""

    def compute_residual(self, logits: torch.Tensor) -> float:
        """Mean difference of the engine to log softmax(logits), without the largest twentieth."""
        expected = logits.log_softmax(-1).gather(1, self.labels[:, None])[:, 0]
        differences = (expected - self.rollout).double().abs().sort().values
        return differences[: -(-len(differences) * 19 // 20)].mean().item()


def find_best_explanation(reference: Reference, answers: Answers, sampling: Sampling) -> Explanation | None:
    """The mistake that explains the engine's log-probs of these completions best; None if they have no numbers."""
    tokens = _collect_tokens(reference, answers)
    if tokens is None:
        return None
    found = [Explanation(kind, tokens.compute_residual(logits)) for kind, logits in _apply_mistakes(tokens, sampling)]
    found.append(_fit_temperature(tokens))
    return min(found, key=lambda explanation: explanation.left)


def _collect_tokens(reference: Reference, answers: Answers) -> _Tokens | None:
    """Return the tokens of the first answers, up to the number examined."""
    logits, labels, seen, rollout = [], [], [], []
    for prompt, response, log_probs in zip(answers.prompts, answers.responses, answers.log_probs, strict=True):
        of_answer = reference.logits(prompt, response)
        for index, (token, log_prob) in enumerate(zip(response, log_probs, strict=True)):
            if torch.tensor(log_prob).isfinite() and len(labels) < _MAX_TOKENS:
                logits.append(of_answer[index])
                labels.append(token)
                seen.append(torch.tensor([*prompt, *response[:index]]))
                rollout.append(log_prob)
        if len(labels) >= _MAX_TOKENS:
            break
    if not labels:
        return None
    width = max(map(len, seen))
    filled = torch.stack([torch.cat([row, row[:1].expand(width - len(row))]) for row in seen])
    return _Tokens(torch.stack(logits), torch.tensor(labels), filled, torch.tensor(rollout))


def _apply_mistakes(tokens: _Tokens, sampling: Sampling) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Apply the known mistakes under this sampling setting to logits [N, V]."""
    params = sampling.params
    greedy = params.get("temperature", 1.0) == 0
    truncates = greedy or params.get("top_p", 1) < 1 or params.get("top_k", -1) > 0 or params.get("min_p", 0) > 0
    penalized = None
    if params.get("repetition_penalty", 1.0) != 1.0:
        penalty = torch.full((len(tokens.labels),), params["repetition_penalty"])
        penalized = apply_repetition_penalty(tokens.logits, tokens.seen, penalty)
        yield "penalty", penalized / sampling.temperature
    if truncates:
        yield "truncation", _apply_truncation(tokens.logits / sampling.temperature, sampling, greedy)
        if penalized is not None:
            yield "penalty and truncation", _apply_truncation(penalized / sampling.temperature, sampling, greedy)


def _apply_truncation(logits: torch.Tensor, sampling: Sampling, greedy: bool) -> torch.Tensor:
    params, num, words = sampling.params, *logits.shape
    top_k = 1 if greedy else params.get("top_k", -1)
    batch = SamplingBatch(
        temperature=torch.ones(num),
        all_greedy=False,
        any_greedy=False,
        top_p=torch.full((num,), float(params.get("top_p", 1.0)), dtype=torch.float64),
        top_k=torch.full((num,), top_k if 0 < top_k < words else words),
        min_p=torch.full((num,), float(params.get("min_p", 0.0))),
    )
    return truncate(logits.softmax(-1), batch).log()


def _fit_temperature(tokens: _Tokens) -> Explanation:
    """The temperature, from 1/8 to 8, under which the trainer's log-probs are nearest to the engine's: 61 on a
    logarithmic scale, then twice 21 between the neighbours of the best."""

    def left(temperature: float) -> float:
        return tokens.compute_residual(tokens.logits / temperature)

    low, high, count = 1 / 8, 8.0, 61
    best = 1.0
    for _ in range(3):
        scale = torch.logspace(torch.tensor(low).log10(), torch.tensor(high).log10(), count, dtype=torch.float64)
        candidates = scale.tolist()
        best = min(candidates, key=left)
        step = candidates[1] / candidates[0]
        low, high, count = best / step, best * step, 21
    best = min((best, round(best, 1), round(best, 2)), key=left)  # people set round ones
    return Explanation("temperature", left(best), best)
