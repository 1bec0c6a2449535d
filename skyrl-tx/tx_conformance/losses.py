"""Losses are their closed forms, in value and in gradient; and they are sums.

The gradient of each loss with respect to a log-prob is known in closed form from what `forward` returns, so a step on
that loss and a step of cross-entropy weighted with minus that gradient must lead to the same weights. The scale of
cross-entropy itself is measured by `optimizer.gradient_scale`.
"""

import typing
from collections.abc import Callable

import numpy as np
from tinker import types  # pyright: ignore[reportMissingImports]

from tx_conformance.checks import Skip, check, expect, expect_close, expect_far
from tx_conformance.client import datum, text_datum
from tx_conformance.server import ServerUnderTest

RATIOS = np.exp(np.tile([0.0, 0.05, -0.1, 0.6, -0.9, 2.0, -2.0, 0.15], 2))
"""p / q of the lesson's 16 tokens, inside and outside of every clip."""
ADVANTAGES = np.array([1.0, -1.0, 0.5, 1.5, -0.5, 1.0, 1.0, -2.0, -1.0, 1.0, -0.5, -1.5, 0.5, -1.0, -1.0, 2.0])
Formula = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(lp, q, A), each [N] -> what is summed and minimised [N], and its derivative by lp [N]."""


def importance_sampling(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ratio = np.exp(lp - q)
    return -ratio * a, -ratio * a


def ppo(low: float, high: float) -> Formula:
    def formula(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratio = np.exp(lp - q)
        free, clipped = ratio * a, np.clip(ratio, low, high) * a
        return -np.minimum(free, clipped), np.where((free <= clipped), -free, 0.0)

    return formula


def cispo(low: float, high: float) -> Formula:
    def formula(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        clipped = np.clip(np.exp(lp - q), low, high)
        return -clipped * lp * a, -clipped * a

    return formula


def dro(beta: float) -> Formula:
    def formula(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return -(lp * a - 0.5 * beta * (lp - q) ** 2), -(a - beta * (lp - q))

    return formula


def gspo(low: float, high: float) -> Formula:
    def formula(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ppo(low, high)(np.full_like(lp, np.mean(lp - q)), np.zeros_like(q), a)

    return formula


def holds(
    server: ServerUnderTest, loss: str, formula: Formula, config: dict[str, float] | None = None, **more: object
) -> None:
    """The loss's value, and the weights after a step, are the formula's."""
    tokens = server.lesson
    q = server.base_logprobs - np.log(RATIOS)
    inputs = {"logprobs": q, "advantages": ADVANTAGES} | more
    adapter, twin = server.adapter(), server.adapter()
    result = adapter.backward([datum(tokens[:-1], tokens[1:], **inputs)], loss, config)
    terms, slope = formula(result.logprobs[0], np.float32(q).astype(float), ADVANTAGES)
    expect_close(result.loss, terms.sum(), 1e-3 * max(1.0, np.abs(terms).sum()), "loss:sum")
    adapter.step(**server.gentle)
    twin.backward([text_datum(tokens, -slope)])
    twin.step(**server.gentle)
    got, wanted = adapter.logprobs(tokens)[0], twin.logprobs(tokens)[0]
    moved = float(np.max(np.abs(wanted - server.base_logprobs)))
    expect_close(got, wanted, 0.02 * moved + 1e-5, f"log-probs after a step that moves them by {moved:.3g}")


@check
def cross_entropy(server: ServerUnderTest) -> None:
    """cross_entropy is minus the weighted sum of log-probs, with weights of any size and sign"""
    weights = np.linspace(-1, 3, 16)
    result = server.adapter().backward([text_datum(server.lesson, weights)])
    expect_close(result.loss, -float((weights * result.logprobs[0]).sum()), 1e-2, "loss:sum")


@check
def importance_sampling_loss(server: ServerUnderTest) -> None:
    """importance_sampling is minus the sum of ratio times advantage"""
    holds(server, "importance_sampling", importance_sampling)


@check
def first_step_is_policy_gradient(server: ServerUnderTest) -> None:
    """importance_sampling on policy has ratio 1: its loss is minus the sum of advantages"""
    tokens = server.lesson
    data = [datum(tokens[:-1], tokens[1:], logprobs=server.base_logprobs, advantages=ADVANTAGES)]
    expect_close(server.adapter().backward(data, "importance_sampling").loss, -ADVANTAGES.sum(), 1e-3, "loss:sum")


@check
def ppo_default(server: ServerUnderTest) -> None:
    """ppo clips the ratio at 0.8 and 1.2 unless told otherwise"""
    holds(server, "ppo", ppo(0.8, 1.2))


@check
def ppo_config(server: ServerUnderTest) -> None:
    """ppo takes its bounds from clip_low_threshold and clip_high_threshold, as bounds and not as distances from 1"""
    holds(server, "ppo", ppo(0.5, 3.0), {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0})


@check
def cispo_default(server: ServerUnderTest) -> None:
    """cispo weighs log-probs with the ratio clipped at 0 and 4, through which no gradient flows"""
    holds(server, "cispo", cispo(0.0, 4.0))


@check
def cispo_config(server: ServerUnderTest) -> None:
    """cispo takes its bounds from clip_low_threshold and clip_high_threshold"""
    holds(server, "cispo", cispo(0.7, 1.3), {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3})


@check
def dro_loss(server: ServerUnderTest) -> None:
    """dro is minus the sum of log-prob times advantage, less half of beta times the squared log-ratio"""
    holds(server, "dro", dro(0.3), {"beta": 0.3})


@check
def gspo_loss(server: ServerUnderTest) -> None:
    """gspo is ppo with one ratio a sequence: the mean over its masked tokens"""
    if "gspo" not in typing.get_args(types.LossFnType):
        raise Skip("this SDK knows no gspo")
    holds(server, "gspo", gspo(0.8, 1.2), sequence_ratio_mask=np.ones(16))


@check
def loss_is_a_sum(server: ServerUnderTest) -> None:
    """the loss is a plain sum: twice the datum, or twice the weights, is twice the loss, for short and long alike"""
    adapter = server.adapter()
    single = adapter.backward([text_datum(server.lesson)]).loss
    expect_close(adapter.backward([text_datum(server.lesson)] * 2).loss, 2 * single, 1e-3 * single, "twice the datum")
    doubled = adapter.backward([text_datum(server.lesson, np.full(16, 2.0))]).loss
    expect_close(doubled, 2 * single, 1e-3 * single, "twice the weights")
    short = text_datum(server.text(3, seed=4))
    both = adapter.backward([text_datum(server.lesson), short]).loss
    expect_close(both, single + adapter.backward([short]).loss, 1e-3 * single, "beside a short datum")


@check
def gradient_is_a_sum(server: ServerUnderTest) -> None:
    """gradients are sums too: twice the datum moves twice as far, and a neighbour of no weight slows nothing"""
    silent = text_datum(server.text(40, seed=6), np.zeros(39))
    batches = {
        "once": [text_datum(server.lesson)],
        "twice the datum": [text_datum(server.lesson)] * 2,
        "twice the weights": [text_datum(server.lesson, np.full(16, 2.0))],
        "beside a datum of no weight": [text_datum(server.lesson), silent],
        "in an advantage": [_rewarded(server, 2.0)],
    }
    gains = {}
    for name, batch in batches.items():
        adapter = server.adapter()
        adapter.backward(batch, "importance_sampling" if name == "in an advantage" else "cross_entropy")
        adapter.step(**server.gentle)
        gains[name] = server.gain(adapter)
    once = gains.pop("once")
    for name, gain in gains.items():
        wanted = 1.0 if name.startswith("beside") else 2.0
        tolerance = 0.02 if name.startswith("beside") else 0.4
        expect(abs(gain / once - wanted) < tolerance, f"{name}: moved {gain / once:.3f} times as far, not {wanted}")


@check
def weights_choose_tokens(server: ServerUnderTest) -> None:
    """a token of weight 0 teaches nothing: its target may be anything"""
    tokens, weights = server.lesson, np.r_[np.zeros(8), np.ones(8)]
    other = [(t + 1) % server.num_tokens for t in tokens[1:9]] + list(tokens[9:])
    one, two, three = server.adapter(), server.adapter(), server.adapter()
    one.backward([datum(tokens[:-1], tokens[1:], weights=weights)])
    two.backward([datum(tokens[:-1], other, weights=weights)])
    three.backward([datum(tokens[:-1], tokens[1:], weights=np.ones(16))])
    for adapter in (one, two, three):
        adapter.step(**server.gentle)
    expect_close(one.logprobs(tokens), two.logprobs(tokens), 1e-5, "log-probs, with other targets of no weight")
    expect_far(one.logprobs(tokens), three.logprobs(tokens), 1e-4, "log-probs, with all weights")


@check
def negative_advantage_unlearns(server: ServerUnderTest) -> None:
    """a negative advantage makes its tokens less likely"""
    adapter = server.adapter()
    adapter.backward([_rewarded(server, -1.0)], "importance_sampling")
    adapter.step(**server.gentle)
    expect(server.gain(adapter) < 0, "they became likelier")


def _rewarded(server: ServerUnderTest, advantage: float) -> object:
    tokens = server.lesson
    return datum(tokens[:-1], tokens[1:], logprobs=server.base_logprobs, advantages=np.full(16, advantage))
