"""One step of AdamW is what the formula says, seen through log-probs and through the adapter's archive.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - lr wd p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

With a large eps a first step is plain descent (`World.gentle`); with a small one each weight moves by lr, against the
sign of its gradient. B of a fresh adapter is 0, so A has no gradient and stays.
"""

import numpy as np

from tx.contract.archive import PeftAdapter, fetch
from tx.contract.checks import check, expect, expect_close, expect_equal, expect_far
from tx.contract.client import Adapter, text_datum
from tx.contract.wire import text_datum as json_datum
from tx.contract.world import World

LR = 1e-2


def taught(world: World, scale: float = 1.0, **adam: float) -> Adapter:
    """A fresh adapter after one step on the lesson, its tokens weighted with `scale`."""
    adapter = world.adapter()
    adapter.backward([text_datum(world.lesson, np.full(16, scale))])
    adapter.step(**adam)
    return adapter


def idle(world: World, adapter: Adapter, **adam: float) -> None:
    """A step whose gradient is zero."""
    adapter.backward([text_datum(world.lesson, np.zeros(16))])
    adapter.step(**adam)


def weights(world: World, adapter: Adapter) -> PeftAdapter:
    return fetch(world.wire, adapter.save(world.wire.fresh("adam")))


def moved(world: World, adapter: Adapter) -> float:
    return world.gain(adapter)


@check
def step_without_gradient(world: World) -> None:
    """a step with nothing accumulated changes nothing, weight decay or not"""
    adapter = taught(world, learning_rate=LR)
    before = adapter.logprobs(world.lesson)[0]
    adapter.step(learning_rate=0.5)
    adapter.step(learning_rate=0.5, weight_decay=0.5)
    expect_equal(adapter.logprobs(world.lesson)[0].tolist(), before.tolist(), "log-probs")


@check
def step_clears_gradient(world: World) -> None:
    """a step uses up what was accumulated: the next one does not see it again"""
    once, twice = taught(world, **world.gentle), taught(world, **world.gentle)
    for adapter in (once, twice):
        before = adapter.logprobs(world.lesson)[0]
        adapter.backward([text_datum(world.text(9, seed=8))])
        adapter.step(**world.gentle | {"beta1": 0.0})
        expect_far(adapter.logprobs(world.lesson)[0], before, 0, "the second step did nothing")
    fresh = world.adapter()
    fresh.backward([text_datum(world.lesson), text_datum(world.text(9, seed=8))])
    fresh.step(**world.gentle)
    expect_close(once.logprobs(world.lesson), twice.logprobs(world.lesson), 1e-6, "twins")
    expect_far(once.logprobs(world.lesson), fresh.logprobs(world.lesson), 0, "two steps are not one")


@check
def learning_rate_scales(world: World) -> None:
    """twice the learning rate goes twice as far; none goes nowhere"""
    one = moved(world, taught(world, **world.gentle))
    double = world.gentle | {"learning_rate": 2 * world.gentle["learning_rate"]}
    ratio = moved(world, taught(world, **double)) / one
    expect(1.6 < ratio < 2.5, f"moved {ratio:.2f} times as far")
    expect_close(moved(world, taught(world, learning_rate=0.0)), 0.0, 1e-5, "moved with learning rate 0")


@check
def adam_ignores_scale(world: World) -> None:
    """with the default eps a first step is as long for a small part of the gradient"""
    small, large = (taught(world, scale, learning_rate=world.small_rate) for scale in (1 / 128, 1.0))
    one, two = moved(world, small), moved(world, large)
    expect_close(one / two, 1.0, 0.02, "ratio of what they moved")


@check
def adam_remembers(world: World) -> None:
    """moments are averaged and corrected for their start: a second step without gradient goes b1 / (1 + b1) as far
    when eps is large, and that over sqrt(b2 / (1 + b2)) when it is small"""
    for beta1 in (0.9, 0.5):
        adapter = taught(world, **world.gentle, beta1=beta1)
        first = moved(world, adapter)
        idle(world, adapter, **world.gentle, beta1=beta1)
        expect_close(moved(world, adapter) / first - 1, beta1 / (1 + beta1), 0.08, f"second step, b1 {beta1}")
    beta1, beta2, rate = 0.9, 0.8, world.small_rate
    adapter = taught(world, learning_rate=rate, beta1=beta1, beta2=beta2)
    first = moved(world, adapter)
    idle(world, adapter, learning_rate=rate, beta1=beta1, beta2=beta2)
    wanted = beta1 / (1 + beta1) / np.sqrt(beta2 / (1 + beta2))
    expect_close(moved(world, adapter) / first - 1, wanted, 0.08, "second step, eps small")


@check
def gradient_scale(world: World) -> None:
    """the gradient is that of the plain sum: its norm by how far descent goes is its norm by clipping

    Descent by eta g gains eta |g|^2; clipped to c it gains eta |g| c. So both tell |g|, and a mean would not agree.
    """
    eta = world.gentle["learning_rate"] / world.gentle["eps"]
    free = moved(world, taught(world, **world.gentle))
    by_descent = np.sqrt(free / eta)
    clip = by_descent / 4
    clipped = moved(world, taught(world, **world.gentle, grad_clip_norm=clip))
    by_clipping = clipped / (eta * clip)
    expect_close(by_clipping / by_descent, 1.0, 0.15, "norm by clipping over norm by descent")


@check
def grad_clip(world: World) -> None:
    """grad_clip_norm shortens a longer gradient to that norm, and leaves a shorter one alone"""
    free = moved(world, taught(world, **world.gentle))
    norm = np.sqrt(free * world.gentle["eps"] / world.gentle["learning_rate"])
    loose = moved(world, taught(world, **world.gentle, grad_clip_norm=norm * 10))
    expect_close(loose / free, 1.0, 1e-3, "moved with a loose clip")
    tight = [moved(world, taught(world, **world.gentle, grad_clip_norm=norm / n)) for n in (4, 8)]
    expect_close(tight[0] / tight[1], 2.0, 0.1, "moved with a clip twice as wide")
    expect(tight[0] < 0.5 * free, "a tight clip does nothing")


@check
def weight_decay_is_decoupled(world: World) -> None:
    """decay takes lr * wd of each weight beside the step: all of it when that is 1"""
    adapter = taught(world, learning_rate=LR)
    expect_far(adapter.logprobs(world.lesson)[0], world.base_logprobs, 1e-3, "the first step did nothing")
    idle(world, adapter, learning_rate=0.1, weight_decay=10.0, beta1=0.0)
    expect_close(adapter.logprobs(world.lesson)[0], world.base_logprobs, 2e-3, "log-probs after the adapter was wiped")


@check
def weight_decay_is_ones_own(world: World) -> None:
    """another adapter's decay, steps and failures leave an adapter as it was, to the bit"""
    mine, other = taught(world, learning_rate=LR), taught(world, learning_rate=LR)
    before = mine.logprobs(world.lesson)[0].tolist()
    for _ in range(3):
        other.backward([text_datum(world.lesson)])
        other.step(learning_rate=0.1, weight_decay=0.5)
    expect_equal(mine.logprobs(world.lesson)[0].tolist(), before, "my log-probs")


@check
def impossible_step(world: World) -> None:
    """a step after which weights would not be finite fails and changes nothing: the next one finds the gradient"""
    wire, tried, twin = world.wire, world.model(), world.model()
    for model in (tried, twin):
        wire.result(wire.backward(model, 1, [json_datum(world.lesson)]))
    for seq, adam in ((2, {"learning_rate": 1e30}), (3, {"learning_rate": 1.0, "weight_decay": 1e30})):
        answer = wire.step(tried, seq, **adam)
        refused = answer.status_code in (400, 422) or "error" in wire.outcome(wire.accepted(answer))
        expect(refused, f"a step with {adam} was taken")
    wire.result(wire.step(tried, 4))
    wire.result(wire.step(twin, 2))
    expect_equal(wire.logprobs(tried, 5, world.lesson), wire.logprobs(twin, 3, world.lesson), "log-probs of twins")


@check
def first_step_in_the_archive(world: World) -> None:
    """the first step moves each weight of B by lr, and A not at all"""
    fresh, after = weights(world, world.adapter()), weights(world, taught(world, learning_rate=LR))
    expect_equal(float(np.abs(fresh.all("B")).max()), 0.0, "B of a fresh adapter")
    expect_equal(fresh.all("A").tolist(), after.all("A").tolist(), "A after the step")
    lengths = np.abs(after.all("B"))
    expect_close(lengths[lengths > 0], np.full((lengths > 0).sum(), LR), 1e-4 * LR + 1e-5, "length of the step")
    expect((lengths > 0).mean() > 0.5, "most weights of B did not move")


@check
def decay_in_the_archive(world: World) -> None:
    """decay multiplies each weight of A by 1 - lr * wd"""
    adapter = taught(world, learning_rate=LR)
    before = weights(world, adapter).all("A")
    idle(world, adapter, learning_rate=0.1, weight_decay=0.5, beta1=0.0)
    expect_close(weights(world, adapter).all("A"), before * 0.95, 1e-5 * np.abs(before).max() + 1e-7, "A")


@check
def gradient_in_the_archive(world: World) -> None:
    """B after a step of descent is minus eta times the gradient, and twice that for twice the weights"""
    one, two = (weights(world, taught(world, scale, **world.gentle)).all("B") for scale in (1.0, 2.0))
    expect_close(two, 2 * one, 1e-2 * float(np.abs(one).max()), "B")


@check
def trained_layers(world: World) -> None:
    """train_attn and train_mlp decide which layers have an adapter"""
    names = {}
    for attention, mlp in ((True, False), (False, True)):
        adapter = world.adapter(train_attn=attention, train_mlp=mlp)
        adapter.backward([text_datum(world.lesson)])
        adapter.step(learning_rate=LR)
        expect_far(adapter.logprobs(world.lesson)[0], world.base_logprobs, 1e-4, "learned nothing")
        names[attention, mlp] = set(weights(world, adapter).weights)
    attention_only, mlp_only = names[True, False], names[False, True]
    expect(not attention_only & mlp_only, f"in both: {sorted(attention_only & mlp_only)[:3]}")
    expect(all("mlp" not in name for name in attention_only), "train_mlp=False has layers of the mlp")
    expect(all("attn" not in name for name in mlp_only), "train_attn=False has layers of attention")


@check
def unembedding(world: World) -> None:
    """train_unembed puts an adapter on the output layer, or is refused because that is tied to the embedding"""
    wire = world.wire
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
def peft_config(world: World) -> None:
    """the archive says rank and scale: alpha 32, so that the adapter adds 32 / rank * B A"""
    config = weights(world, world.adapter(rank=8)).config
    expect_equal((config["r"], config["lora_alpha"], config["peft_type"]), (8, 32, "LORA"), "r, lora_alpha, peft_type")


@check
def metrics_have_a_how(world: World) -> None:
    """metrics of a step are numbers, named `name:how` or with a prefix, never infinite"""
    adapter = world.adapter()
    adapter.backward([text_datum(world.lesson)])
    metrics = adapter.step(learning_rate=LR)
    expect(all(np.isfinite(value) for value in metrics.values()), f"{metrics}")
