"""Forward, forward-backward: what they return, how they add up, how large batches are cut."""

import inspect

import numpy as np
from tinker import types  # pyright: ignore[reportMissingImports]

from tx_conformance.checks import Skip, check, expect, expect_close, expect_equal
from tx_conformance.client import AdapterHandle, Pass, datum, done, tensor, text_datum
from tx_conformance.server import ServerUnderTest

STEP = {"learning_rate": 1e-2}


def taught(server: ServerUnderTest, *batches: list[object]) -> AdapterHandle:
    """A fresh adapter after one step on all of it."""
    adapter = server.adapter()
    for batch in batches:
        adapter.backward(batch)
    adapter.step(**STEP)
    return adapter


@check
def forward_gives_logprobs(server: ServerUnderTest) -> None:
    """forward returns a log-prob for each target of each datum, in order, with the metric `loss:sum`"""
    texts = [server.text(n, seed=n) for n in (6, 3, 9)]
    adapter = server.adapter()
    result = adapter.forward([text_datum(text) for text in texts])
    expect_equal([len(lp) for lp in result.logprobs], [5, 2, 8], "lengths")
    expect(all((lp < 0).all() and np.isfinite(lp).all() for lp in result.logprobs), "a log-prob is not below 0")
    expect_close(result.loss, -sum(lp.sum() for lp in result.logprobs), 1e-3, "loss:sum")
    expect(all(":" in key for key in result.metrics), f"metrics without `:how`: {list(result.metrics)}")
    alone = [adapter.logprobs(text)[0] for text in texts]
    expect_close(result.logprobs, alone, 1e-4, "log-probs co-batched and alone")


@check
def forward_is_causal(server: ServerUnderTest) -> None:
    """a log-prob depends on what stands before it alone"""
    text = server.text(12)
    changed = [*text[:-1], (text[-1] + 1) % server.num_tokens]
    adapter = server.adapter()
    one, two = adapter.logprobs(text)[0], adapter.logprobs(changed)[0]
    expect_close(one[:-1], two[:-1], 1e-5, "log-probs before the changed token")


@check
def forward_learns_nothing(server: ServerUnderTest) -> None:
    """forward adds nothing to the gradient"""
    adapter = server.adapter()
    adapter.backward([text_datum(server.lesson)])
    adapter.forward([text_datum(server.text(30, seed=5))])
    adapter.step(**STEP)
    plain = taught(server, [text_datum(server.lesson)])
    expect_close(adapter.logprobs(server.lesson), plain.logprobs(server.lesson), 1e-5, "log-probs after a step")


@check
def loss_falls(server: ServerUnderTest) -> None:
    """ten steps on one text make it likelier, step by step"""
    adapter = server.adapter()
    losses = []
    for _ in range(10):
        losses.append(adapter.backward([text_datum(server.lesson)]).loss)
        adapter.step(**STEP)
    expect(losses[-1] < 0.8 * losses[0], f"losses {[round(loss, 2) for loss in losses]}")


@check
def logprobs_are_before_the_step(server: ServerUnderTest) -> None:
    """forward-backward returns the log-probs of the weights it was computed with"""
    adapter = server.adapter()
    result = adapter.backward([text_datum(server.lesson)])
    expect_close(result.logprobs[0], server.base_logprobs, 1e-4, "log-probs")


@check
def default_weights_are_one(server: ServerUnderTest) -> None:
    """cross-entropy without weights counts each token once"""
    tokens = server.lesson
    adapter = server.adapter()
    bare = adapter.forward([datum(tokens[:-1], tokens[1:])])
    expect_close(bare.loss, -float(server.base_logprobs.sum()), 1e-2, "loss:sum")


@check
def accumulation(server: ServerUnderTest) -> None:
    """two calls before a step are one call with the data of both"""
    one, two = [text_datum(server.lesson)], [text_datum(server.text(8, seed=2)), text_datum(server.text(5, seed=3))]
    apart, together = taught(server, one, two), taught(server, one + two)
    expect_close(apart.logprobs(server.lesson), together.logprobs(server.lesson), 1e-4, "log-probs after the step")


@check
def pipelined(server: ServerUnderTest) -> None:
    """calls submitted without waiting are done in the order of submission"""
    data = [text_datum(server.lesson)]
    adapter, patient = server.adapter(), server.adapter()
    futures = []
    for _ in range(4):
        futures.append(adapter.submit(data))
        futures.append(adapter.submit_step(**STEP))
    losses = [Pass.of(done(future)).loss for future in futures[::2]]
    wanted = []
    for _ in range(4):
        wanted.append(patient.backward(data).loss)
        patient.step(**STEP)
    expect_close(losses, wanted, 1e-3, "losses of four pipelined steps")


@check
def large_batch_in_chunks(server: ServerUnderTest) -> None:
    """a batch that the SDK cuts into several requests gives one result, whole and in order"""
    texts = [server.text(3, seed=10 + i % 37) for i in range(1100)]
    adapter = server.adapter()
    result = adapter.backward([text_datum(text) for text in texts])
    expect_equal(len(result.logprobs), 1100, "results")
    expect_close(result.loss, -sum(lp.sum() for lp in result.logprobs), 1e-3 * abs(result.loss), "loss:sum")
    few = adapter.logprobs(*texts[:37])
    for i, got in enumerate(result.logprobs):
        expect_close(got, few[i % 37], 1e-3, f"log-probs of datum {i}")


@check
def chunks_add_up(server: ServerUnderTest) -> None:
    """the gradient of a chunked batch equals the gradient of the whole batch"""
    texts = [text_datum(server.text(3, seed=10 + i % 5)) for i in range(1025)]
    cut, parts = taught(server, texts), taught(server, texts[:500], texts[500:])
    expect_close(cut.logprobs(server.lesson), parts.logprobs(server.lesson), 2e-3, "log-probs after the step")


@check
def several_targets_a_position(server: ServerUnderTest) -> None:
    """targets of shape [N, K] give log-probs of that shape, each as if it were the only one"""
    tokens = server.text(6)
    columns = np.array([server.text(5, seed=s) for s in (1, 2, 3)]).T
    weights = np.arange(15).reshape(5, 3) / 15
    adapter = server.adapter()
    result = adapter.forward([datum(tokens[:5], columns, weights=weights)])
    expect_equal(result.logprobs[0].shape, (5, 3), "shape")
    singles = adapter.forward([datum(tokens[:5], columns[:, k], weights=weights[:, k]) for k in range(3)])
    expect_close(result.logprobs[0].T.tolist(), [lp.tolist() for lp in singles.logprobs], 1e-4, "log-probs")
    expect_close(result.loss, singles.loss, 1e-3, "loss:sum")


@check
def sparse_weights(server: ServerUnderTest) -> None:
    """weights sent as sparse rows are the same weights"""
    if "sparse_crow_indices" not in inspect.signature(types.TensorData).parameters:
        raise Skip("this SDK has no sparse tensors")
    tokens = server.text(4)
    columns = np.array([server.text(3, seed=s) for s in (1, 2)]).T
    dense = datum(tokens[:3], columns, weights=[[0.5, 0.0], [0.0, 0.0], [0.0, 2.0]])
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:3]),
        loss_fn_inputs={
            "target_tokens": tensor(columns, "int64"),
            "weights": types.TensorData(  # pyright: ignore
                data=[0.5, 2.0],
                dtype="float32",
                shape=[3, 2],
                sparse_crow_indices=[0, 1, 1, 2],
                sparse_col_indices=[0, 1],
            ),
        },
    )
    adapter = server.adapter()
    expect_close(adapter.forward([sparse]).loss, adapter.forward([dense]).loss, 1e-4, "loss:sum")


@check
def custom_loss(server: ServerUnderTest) -> None:
    """a loss the client computes moves the weights as its closed form does"""
    try:
        import torch
    except ImportError as error:
        raise Skip("no torch in this environment") from error
    tokens, scale = server.lesson, np.linspace(-1, 2, 16)

    def loss(data: list[object], logprobs: list["torch.Tensor"]) -> tuple["torch.Tensor", dict[str, float]]:
        return -(torch.tensor(scale, dtype=torch.float32) * logprobs[0]).sum(), {"mine": 1.0}

    custom, plain = server.adapter(), server.adapter()
    result = done(custom.client.forward_backward_custom([text_datum(tokens)], loss))
    expect_close(result.metrics["mine"], 1.0, 0, "the loss function's own metric")
    custom.step(**STEP)
    plain.backward([text_datum(tokens, scale)])
    plain.step(**STEP)
    expect_close(custom.logprobs(tokens), plain.logprobs(tokens), 1e-4, "log-probs after the step")
