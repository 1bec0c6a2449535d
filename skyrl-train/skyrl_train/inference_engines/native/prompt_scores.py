"""Log-probs of prompts' own tokens and of the likeliest ones, from hidden states. Knows no model: its output layer is a
function."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from skyrl_train.inference_engines.native.attention import MIN_ROWS
from skyrl_train.inference_engines.native.requests import PromptScores, Request
from skyrl_train.models.token_log_probs import LogitRule

CHUNK = 256
"""Tokens whose logits are in memory at a time."""

Head = Callable[[torch.Tensor, slice], torch.Tensor]
"""Logits [n, V] float32 of states [n, D], and which of all the tokens these are (there may be fewer: what fills up)."""


def ruled(product: torch.Tensor, rule: LogitRule) -> torch.Tensor:
    """Compute the model's logits from the product of its output layer."""
    logits = product if rule.multiplier == 1.0 else product * rule.multiplier
    return logits if rule.softcap is None else (logits / rule.softcap).tanh() * rule.softcap


def score_prompts(requests: Sequence[Request], hidden: Sequence[torch.Tensor], head: Head) -> Iterator[PromptScores]:
    """log softmax(logits / temperature) at the tokens of several prompts and at the likeliest, computed together.

    A token's logits are made as if it were decoded: where decoding is independent of other rows, so are they, and a
    prompt's log-probs are the bits that were reported when its tokens were drawn at this temperature.

    Args:
        requests: with the same `num_top` (which of two equally likely tokens comes first may depend on it)
        hidden: a request: [P - 1, D], the states after each token of its prompt but the last
    """
    scorings = [request.scoring for request in requests if request.scoring is not None]
    lengths = [len(states) for states in hidden]
    states, device = torch.cat(list(hidden)), hidden[0].device
    labels = torch.from_numpy(np.concatenate([request.prompt[1:] for request in requests])).to(device)
    temperatures = np.repeat(np.array([scoring.temperature for scoring in scorings], np.float32), lengths)
    divisor = torch.from_numpy(temperatures).to(device)[:, None]
    places, ids, num_targets = _targets(requests, lengths)
    parts: list[tuple[torch.Tensor, ...]] = []
    of_targets: list[torch.Tensor] = []
    for start in range(0, len(states), CHUNK):
        chunk = slice(start, min(start + CHUNK, len(states)))
        count = chunk.stop - start
        # Filled up to MIN_ROWS, as decoding is: a smaller product takes another kernel, and other bits.
        logits = head(F.pad(states[chunk], (0, 0, 0, max(MIN_ROWS - count, 0))), chunk)[:count]
        # Divided as the sampler divides, by a float32: a product with the reciprocal rounds otherwise.
        scores = (logits / divisor[chunk]).log_softmax(-1)
        # One topk for all: with equal values its choice depends on k, so requests of a batch ask for the same number.
        top = scores.topk(min(scorings[0].num_top, scores.shape[-1]), dim=-1)
        parts.append((scores.gather(1, labels[chunk, None])[:, 0], top.indices, top.values))
        here = slice(*np.searchsorted(places, (chunk.start, chunk.stop)))
        if here.start < here.stop:
            rows, columns = (torch.from_numpy(index).to(device) for index in (places[here] - start, ids[here]))
            of_targets.append(scores[rows, columns])
    target_log_probs = torch.cat(of_targets).cpu().numpy() if of_targets else np.zeros(0, np.float32)
    split = iter(np.split(target_log_probs, np.cumsum(num_targets)[:-1]))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    ends = np.cumsum(lengths).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield PromptScores(*(column[start:end] for column in columns), target_log_probs=next(split))


def _targets(requests: Sequence[Request], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the targets' places among the states of all requests and their ids, in order, and how many each has."""
    starts = np.cumsum([0, *lengths[:-1]])
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    given = (request.scoring.targets if request.scoring is not None else None for request in requests)
    found = [nothing if each is None else each for each in given]
    places = np.concatenate([each[0] + start for each, start in zip(found, starts, strict=True)])
    return places, np.concatenate([each[1] for each in found]), [len(each[0]) for each in found]
