"""Divergences of on-policy distillation: the student's next-token distribution against a teacher's, where the student
wrote. Pure functions.

Shapes: B rows, R response tokens, K candidate tokens at each token.
"""

from typing import Literal

import torch

KLDirection = Literal["reverse", "forward"]


def candidate_kl(
    student: torch.Tensor, teacher: torch.Tensor, direction: KLDirection, *, with_tail: bool
) -> torch.Tensor:
    """KL divergence of two distributions over the same K tokens and, as one more outcome, all others together:

        reverse  sum_i s_i log(s_i / t_i) + s_rest log(s_rest / t_rest)       s_rest = 1 - sum_i s_i
        forward  sum_i t_i log(t_i / s_i) + t_rest log(t_rest / s_rest)       t_rest = 1 - sum_i t_i

    The last term makes it the divergence of the coarsened distributions, and the gradient in s exactly its gradient: it
    is at least 0, at most the divergence over the whole vocabulary, and 0 only where the two agree. Without it, mass
    that the student keeps on other tokens costs nothing, and a reverse sum over K tokens can fall below 0.

    The student's log-probs must carry gradients. (Of a sampled estimate such as k1 or k3 with detached log-probs they
    do not, and a penalty made of it trains nothing.)

    Args:
        student, teacher: [..., K] log-probs; a teacher's of -inf drops the token, whose mass counts among the others.
        with_tail: False where the K tokens are the whole vocabulary, so that nothing is left over but rounding.

    Returns:
        [...] in nats, differentiable in `student`.
    """
    known = teacher > -torch.inf
    # Dropped tokens are filled before any arithmetic: -inf - -inf would be NaN, and NaN * 0 in the backward as well.
    student, teacher = student.masked_fill(~known, 0.0), teacher.masked_fill(~known, 0.0).to(student.dtype)
    s, t = student.exp() * known, teacher.exp() * known
    divergence = (s * (student - teacher) if direction == "reverse" else t * (teacher - student)).sum(dim=-1)
    if not with_tail:
        return divergence
    # Rounding can leave a sum at or above 1: the rest is at least one unit of it, where its gradient ends.
    smallest = torch.finfo(s.dtype).eps
    s_rest, t_rest = ((1 - each.sum(dim=-1)).clamp(min=smallest) for each in (s, t))
    log_ratio = s_rest.log() - t_rest.log()
    return divergence + (s_rest * log_ratio if direction == "reverse" else -t_rest * log_ratio)


def teacher_advantages(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Advantage of each sampled token [B, R] under the k1 estimate of the reverse KL divergence, as a reward of its own
    without a baseline or a sum over later tokens:

        A_t = log teacher(y_t) - log student(y_t)         of the student at the start of the step

    With the policy gradient -A_t grad log student(y_t) the expectation over y_t ~ student is the gradient of
    KL(student || teacher) of this token's distribution.
    """
    return teacher_log_probs - log_probs
