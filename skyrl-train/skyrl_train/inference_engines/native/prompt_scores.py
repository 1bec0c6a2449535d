"""Log-probs of prompt tokens and of the most likely tokens, from hidden states. Independent of the model: its output
layer is passed as a function.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from skyrl_train.inference_engines.native.attention import MIN_ROWS
from skyrl_train.inference_engines.native.requests import PromptScores, Request
from skyrl_train.models.token_log_probs import LogitRule

CHUNK = 256
"""Number of tokens whose logits are in memory at a time."""

Head = Callable[[torch.Tensor, slice], torch.Tensor]
"""Function that computes logits [n, V] float32 of states [n, D], given the slice of their tokens (fewer than n if
padded).
"""


def apply_logit_rules(product: torch.Tensor, rule: LogitRule) -> torch.Tensor:
    """Apply the model's scaling and cap to the product of its output layer."""
    logits = product if rule.multiplier == 1.0 else product * rule.multiplier
    return logits if rule.softcap is None else (logits / rule.softcap).tanh() * rule.softcap


def score_prompts(requests: Sequence[Request], hidden: Sequence[torch.Tensor], head: Head) -> Iterator[PromptScores]:
    """Compute log softmax(logits / temperature) of the tokens of several prompts and of the most likely tokens.

    Logits are computed as in decoding: if decoding is independent of other rows, so are they, and a prompt's log-probs
    equal bit-exactly the values reported when its tokens were sampled at this temperature.

    Args:
        requests: all with the same `num_top` (the order of equally likely tokens may depend on it)
        hidden: per request [P - 1, D], the states after each token of its prompt but the last
    """
    scorings = [request.scoring for request in requests if request.scoring is not None]
    lengths = [len(states) for states in hidden]
    states, device = torch.cat(list(hidden)), hidden[0].device
    labels = torch.from_numpy(np.concatenate([request.prompt[1:] for request in requests])).to(device)
    temperatures = np.repeat(np.array([scoring.temperature for scoring in scorings], np.float32), lengths)
    divisor = torch.from_numpy(temperatures).to(device)[:, None]
    places, ids, num_targets = _collect_targets(requests, lengths)
    parts: list[tuple[torch.Tensor, ...]] = []
    of_targets: list[torch.Tensor] = []
    for start in range(0, len(states), CHUNK):
        chunk = slice(start, min(start + CHUNK, len(states)))
        count = chunk.stop - start
        # Padded to MIN_ROWS like decoding: a smaller product uses another kernel with other bits.
        logits = head(F.pad(states[chunk], (0, 0, 0, max(MIN_ROWS - count, 0))), chunk)[:count]
        # Divided by a float32 like in the sampler: multiplying by the reciprocal rounds differently.
        scores = (logits / divisor[chunk]).log_softmax(-1)
        # One topk for all: for equal values its result depends on k, so requests of a batch have the same k.
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


def _collect_targets(requests: Sequence[Request], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the positions of all targets in the concatenated states, their ids, and the number per request."""
    starts = np.cumsum([0, *lengths[:-1]])
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    given = (request.scoring.targets if request.scoring is not None else None for request in requests)
    found = [nothing if each is None else each for each in given]
    places = np.concatenate([each[0] + start for each, start in zip(found, starts, strict=True)])
    return places, np.concatenate([each[1] for each in found]), [len(each[0]) for each in found]
