"""One step of AdamW is what the formula says, seen through log-probs and through the adapter's archive.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - lr wd p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

With a large eps a first step is plain descent (`ServerUnderTest.gentle`); with a small one each weight moves by lr,
against the sign of its gradient. B of a fresh adapter is 0, so A has no gradient and stays."""

import numpy as np

from tx_conformance.archive import PeftAdapter, fetch
from tx_conformance.checks import check, expect, expect_close, expect_equal, expect_far
from tx_conformance.client import AdapterHandle, text_datum
from tx_conformance.server import ServerUnderTest
from tx_conformance.wire import text_datum as json_datum

LR = 1e-2


def taught(server: ServerUnderTest, scale: float = 1.0, **adam: float) -> AdapterHandle:
    """A fresh adapter after one step on the lesson, its tokens weighted with `scale`."""
    adapter = server.adapter()
    adapter.backward([text_datum(server.lesson, np.full(16, scale))])
    adapter.step(**adam)
    return adapter


def idle(server: ServerUnderTest, adapter: AdapterHandle, **adam: float) -> None:
    """Run a step with zero gradient."""
    adapter.backward([text_datum(server.lesson, np.zeros(16))])
    adapter.step(**adam)


def weights(server: ServerUnderTest, adapter: AdapterHandle) -> PeftAdapter:
    return fetch(server.wire, adapter.save(server.wire.fresh("adam")))


def moved(server: ServerUnderTest, adapter: AdapterHandle) -> float:
    return server.gain(adapter)


@check
def step_without_gradient(server: ServerUnderTest) -> None:
    """a step with nothing accumulated changes nothing, weight decay or not"""
    adapter = taught(server, learning_rate=LR)
    before = adapter.logprobs(server.lesson)[0]
    adapter.step(learning_rate=0.5)
    adapter.step(learning_rate=0.5, weight_decay=0.5)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), before.tolist(), "log-probs")


@check
def step_clears_gradient(server: ServerUnderTest) -> None:
    """a step uses up what was accumulated: the next one does not see it again"""
    once, twice = taught(server, **server.gentle), taught(server, **server.gentle)
    for adapter in (once, twice):
        before = adapter.logprobs(server.lesson)[0]
        adapter.backward([text_datum(server.text(9, seed=8))])
        adapter.step(**server.gentle | {"beta1": 0.0})
        expect_far(adapter.logprobs(server.lesson)[0], before, 0, "the second step did nothing")
    fresh = server.adapter()
    fresh.backward([text_datum(server.lesson), text_datum(server.text(9, seed=8))])
    fresh.step(**server.gentle)
    expect_close(once.logprobs(server.lesson), twice.logprobs(server.lesson), 1e-6, "twins")
    expect_far(once.logprobs(server.lesson), fresh.logprobs(server.lesson), 0, "two steps are not one")


@check
def learning_rate_scales(server: ServerUnderTest) -> None:
    """twice the learning rate goes twice as far; none goes nowhere"""
    one = moved(server, taught(server, **server.gentle))
    double = server.gentle | {"learning_rate": 2 * server.gentle["learning_rate"]}
    ratio = moved(server, taught(server, **double)) / one
    expect(1.6 < ratio < 2.5, f"moved {ratio:.2f} times as far")
    expect_close(moved(server, taught(server, learning_rate=0.0)), 0.0, 1e-5, "moved with learning rate 0")


@check
def adam_ignores_scale(server: ServerUnderTest) -> None:
    """a first step with the default eps is as long for a small part of the gradient"""
    small, large = (taught(server, scale, learning_rate=server.small_rate) for scale in (1 / 128, 1.0))
    one, two = moved(server, small), moved(server, large)
    expect_close(one / two, 1.0, 0.02, "ratio of what they moved")


@check
def adam_remembers(server: ServerUnderTest) -> None:
    """moments are averaged and corrected for their start: a second step without gradient goes b1 / (1 + b1) as far
    when eps is large, and that over sqrt(b2 / (1 + b2)) when it is small"""
    for beta1 in (0.9, 0.5):
        adapter = taught(server, **server.gentle, beta1=beta1)
        first = moved(server, adapter)
        idle(server, adapter, **server.gentle, beta1=beta1)
        expect_close(moved(server, adapter) / first - 1, beta1 / (1 + beta1), 0.08, f"second step, b1 {beta1}")
    beta1, beta2, rate = 0.9, 0.8, server.small_rate
    adapter = taught(server, learning_rate=rate, beta1=beta1, beta2=beta2)
    first = moved(server, adapter)
    idle(server, adapter, learning_rate=rate, beta1=beta1, beta2=beta2)
    wanted = beta1 / (1 + beta1) / np.sqrt(beta2 / (1 + beta2))
    expect_close(moved(server, adapter) / first - 1, wanted, 0.08, "second step, eps small")


@check
def gradient_scale(server: ServerUnderTest) -> None:
    """the gradient belongs to the plain sum: its norm measured by descent equals its norm measured by clipping

    Descent by eta g gains eta |g|^2; clipped to c it gains eta |g| c. Both measure |g|, and would differ for a mean.
    """
    eta = server.gentle["learning_rate"] / server.gentle["eps"]
    free = moved(server, taught(server, **server.gentle))
    by_descent = np.sqrt(free / eta)
    clip = by_descent / 4
    clipped = moved(server, taught(server, **server.gentle, grad_clip_norm=clip))
    by_clipping = clipped / (eta * clip)
    expect_close(by_clipping / by_descent, 1.0, 0.15, "norm by clipping over norm by descent")


@check
def grad_clip(server: ServerUnderTest) -> None:
    """grad_clip_norm shortens a longer gradient to that norm, and leaves a shorter one alone"""
    free = moved(server, taught(server, **server.gentle))
    norm = np.sqrt(free * server.gentle["eps"] / server.gentle["learning_rate"])
    loose = moved(server, taught(server, **server.gentle, grad_clip_norm=norm * 10))
    expect_close(loose / free, 1.0, 1e-3, "moved with a loose clip")
    tight = [moved(server, taught(server, **server.gentle, grad_clip_norm=norm / n)) for n in (4, 8)]
    expect_close(tight[0] / tight[1], 2.0, 0.1, "moved with a clip twice as wide")
    expect(tight[0] < 0.5 * free, "a tight clip does nothing")


@check
def weight_decay_is_decoupled(server: ServerUnderTest) -> None:
    """decay subtracts lr * wd of each weight independently of the step: all of it at 1"""
    adapter = taught(server, learning_rate=LR)
    expect_far(adapter.logprobs(server.lesson)[0], server.base_logprobs, 1e-3, "the first step did nothing")
    idle(server, adapter, learning_rate=0.1, weight_decay=10.0, beta1=0.0)
    expect_close(
        adapter.logprobs(server.lesson)[0], server.base_logprobs, 2e-3, "log-probs after the adapter was wiped"
    )


@check
def weight_decay_is_ones_own(server: ServerUnderTest) -> None:
    """another adapter's decay, steps and failures leave an adapter as it was, to the bit"""
    mine, other = taught(server, learning_rate=LR), taught(server, learning_rate=LR)
    before = mine.logprobs(server.lesson)[0].tolist()
    for _ in range(3):
        other.backward([text_datum(server.lesson)])
        other.step(learning_rate=0.1, weight_decay=0.5)
    expect_equal(mine.logprobs(server.lesson)[0].tolist(), before, "my log-probs")


@check
def impossible_step(server: ServerUnderTest) -> None:
    """a step after which weights would not be finite fails and changes nothing: the next one finds the gradient"""
    wire, tried, twin = server.wire, server.model(), server.model()
    for model in (tried, twin):
        wire.result(wire.backward(model, 1, [json_datum(server.lesson)]))
    for seq, adam in ((2, {"learning_rate": 1e30}), (3, {"learning_rate": 1.0, "weight_decay": 1e30})):
        answer = wire.step(tried, seq, **adam)
        refused = answer.status_code in (400, 422) or "error" in wire.outcome(wire.accepted(answer))
        expect(refused, f"a step with {adam} was taken")
    wire.result(wire.step(tried, 4))
    wire.result(wire.step(twin, 2))
    expect_equal(wire.logprobs(tried, 5, server.lesson), wire.logprobs(twin, 3, server.lesson), "log-probs of twins")


@check
def first_step_in_the_archive(server: ServerUnderTest) -> None:
    """the first step moves each weight of B by lr, and A not at all"""
    fresh, after = weights(server, server.adapter()), weights(server, taught(server, learning_rate=LR))
    expect_equal(float(np.abs(fresh.all("B")).max()), 0.0, "B of a fresh adapter")
    expect_equal(fresh.all("A").tolist(), after.all("A").tolist(), "A after the step")
    lengths = np.abs(after.all("B"))
    expect_close(lengths[lengths > 0], np.full((lengths > 0).sum(), LR), 1e-4 * LR + 1e-5, "length of the step")
    expect((lengths > 0).mean() > 0.5, "most weights of B did not move")


@check
def decay_in_the_archive(server: ServerUnderTest) -> None:
    """decay multiplies each weight of A by 1 - lr * wd"""
    adapter = taught(server, learning_rate=LR)
    before = weights(server, adapter).all("A")
    idle(server, adapter, learning_rate=0.1, weight_decay=0.5, beta1=0.0)
    expect_close(weights(server, adapter).all("A"), before * 0.95, 1e-5 * np.abs(before).max() + 1e-7, "A")


@check
def gradient_in_the_archive(server: ServerUnderTest) -> None:
    """B after a step of descent is minus eta times the gradient, and twice that for twice the weights"""
    one, two = (weights(server, taught(server, scale, **server.gentle)).all("B") for scale in (1.0, 2.0))
    expect_close(two, 2 * one, 1e-2 * float(np.abs(one).max()), "B")


@check
def trained_layers(server: ServerUnderTest) -> None:
    """train_attn and train_mlp decide which layers have an adapter"""
    names = {}
    for attention, mlp in ((True, False), (False, True)):
        adapter = server.adapter(train_attn=attention, train_mlp=mlp)
        adapter.backward([text_datum(server.lesson)])
        adapter.step(learning_rate=LR)
        expect_far(adapter.logprobs(server.lesson)[0], server.base_logprobs, 1e-4, "learned nothing")
        names[attention, mlp] = set(weights(server, adapter).weights)
    attention_only, mlp_only = names[True, False], names[False, True]
    expect(not attention_only & mlp_only, f"in both: {sorted(attention_only & mlp_only)[:3]}")
    expect(all("mlp" not in name for name in attention_only), "train_mlp=False has layers of the mlp")
    expect(all("attn" not in name for name in mlp_only), "train_attn=False has layers of attention")


@check
def unembedding(server: ServerUnderTest) -> None:
    """train_unembed puts an adapter on the output layer, or is refused because that is tied to the embedding"""
    wire = server.wire
    made = wire.create_model(wire.session(), lora_config={"rank": 4, "train_unembed": True, "seed": 7})
    if made.status_code != 200:
        expect("tied" in made.text or "tie_word" in made.text, f"refused, but not because of tying: {made.text}")
        return
    model_id = wire.result(made)["model_id"]
    path = wire.result(wire.save(model_id, 1, wire.fresh("unembed")))["path"]
    wire.unload(model_id)
    names = fetch(wire, path).weights
    expect(any("lm_head" in name for name in names), f"no lm_head among {sorted(names)[-4:]}")


@check
def peft_config(server: ServerUnderTest) -> None:
    """the archive says rank and scale: alpha 32, so that the adapter adds 32 / rank * B A"""
    config = weights(server, server.adapter(rank=8)).config
    expect_equal((config["r"], config["lora_alpha"], config["peft_type"]), (8, 32, "LORA"), "r, lora_alpha, peft_type")


@check
def metrics_have_a_how(server: ServerUnderTest) -> None:
    """metrics of a step are numbers, named `name:how` or with a prefix, never infinite"""
    adapter = server.adapter()
    adapter.backward([text_datum(server.lesson)])
    metrics = adapter.step(learning_rate=LR)
    expect(all(np.isfinite(value) for value in metrics.values()), f"{metrics}")
