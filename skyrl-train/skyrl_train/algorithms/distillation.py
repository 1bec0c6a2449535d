"""Divergences of on-policy distillation between the next-token distributions of student and teacher, at the student's
response tokens. Pure functions.

Shapes: B rows, R response tokens, K candidate tokens at each position.
"""

from typing import Literal

import torch

KLDirection = Literal["reverse", "forward"]


def compute_candidate_kl(
    student: torch.Tensor, teacher: torch.Tensor, direction: KLDirection, *, with_tail: bool
) -> torch.Tensor:
    """Compute the KL divergence of two distributions over the same K tokens, with all other tokens as one more outcome:

        reverse  sum_i s_i log(s_i / t_i) + s_rest log(s_rest / t_rest)       s_rest = 1 - sum_i s_i
        forward  sum_i t_i log(t_i / s_i) + t_rest log(t_rest / s_rest)       t_rest = 1 - sum_i t_i

    With the last term this is the divergence of the coarsened distributions, and its gradient in s is exact: it is at
    least 0, at most the divergence over the whole vocabulary, and 0 only if the two agree. Without it, student mass on
    other tokens costs nothing, and a reverse sum over K tokens can fall below 0.

    The student's log-probs must carry gradients. (A sampled estimate such as k1 or k3 with detached log-probs has none,
    and trains nothing.)

    Args:
        student, teacher: [..., K] log-probs; a teacher's -inf drops the token and adds its mass to the rest.
        with_tail: False if the K tokens are the whole vocabulary, so that the rest is only rounding error.

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
    # Rounding can leave a sum at or above 1: the rest is clamped to one rounding unit, where its gradient ends.
    smallest = torch.finfo(s.dtype).eps
    s_rest, t_rest = ((1 - each.sum(dim=-1)).clamp(min=smallest) for each in (s, t))
    log_ratio = s_rest.log() - t_rest.log()
    return divergence + (s_rest * log_ratio if direction == "reverse" else -t_rest * log_ratio)


def compute_teacher_advantages(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Compute the advantage of each sampled token [B, R] from the k1 estimate of the reverse KL divergence, without a
    baseline or a sum over later tokens:

        A_t = log teacher(y_t) - log student(y_t)         student at the start of the step

    With the policy gradient -A_t grad log student(y_t) the expectation over y_t ~ student is the gradient of KL(student
    || teacher) of this token's distribution.
    """
    return teacher_log_probs - log_probs
