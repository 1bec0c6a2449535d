"""Requests of a model are executed once each, in seq order, regardless of network reordering and retries."""

from tx_conformance.checks import check, expect, expect_close, expect_equal, expect_refused
from tx_conformance.server import ServerUnderTest
from tx_conformance.wire import text, text_datum


def in_order(server: ServerUnderTest) -> list[float]:
    """Log-probs of the lesson after two passes and a step, sent one after another."""
    wire, model_id = server.wire, server.model()
    for seq in (1, 2):
        wire.result(wire.backward(model_id, seq, [text_datum(server.text(9, seed=seq))]))
    wire.result(wire.step(model_id, 3))
    return wire.logprobs(model_id, 4, server.lesson)


@check
def any_order_of_arrival(server: ServerUnderTest) -> None:
    """requests that arrive last first are done in the order of their seqs"""
    wire, model_id = server.wire, server.model()
    step = wire.accepted(wire.step(model_id, 3))
    two = wire.accepted(wire.backward(model_id, 2, [text_datum(server.text(9, seed=2))]))
    one = wire.accepted(wire.backward(model_id, 1, [text_datum(server.text(9, seed=1))]))
    for request_id in (one, two, step):
        expect("error" not in wire.outcome(request_id), f"{request_id} failed")
    expect_close(wire.logprobs(model_id, 4, server.lesson), in_order(server), 1e-6, "log-probs after the step")


@check
def a_gap_waits(server: ServerUnderTest) -> None:
    """a request with a missing predecessor waits, and does not fail"""
    wire, model_id = server.wire, server.model()
    two = wire.accepted(wire.step(model_id, 2))
    expect(wire.waits(two), "seq 2 is done before seq 1 came")
    wire.result(wire.backward(model_id, 1, [text_datum(server.lesson)]))
    expect("error" not in wire.outcome(two), "seq 2 failed")


@check
def a_gap_blocks_nobody_else(server: ServerUnderTest) -> None:
    """another model continues while one waits for a missing seq"""
    wire, stuck, other = server.wire, server.model(), server.model()
    wire.accepted(wire.step(stuck, 5))
    wire.result(wire.backward(other, 1, [text_datum(server.lesson)]))


@check
def resent_pass(server: ServerUnderTest) -> None:
    """a forward-backward that is sent again has the same request id, and its gradient is added once"""
    wire, model_id = server.wire, server.model()
    ids = set()
    for seq in (1, 2):
        for _ in range(3):
            ids.add(wire.accepted(wire.backward(model_id, seq, [text_datum(server.text(9, seed=seq))])))
    expect_equal(len(ids), 2, "request ids of two requests")
    wire.result(wire.step(model_id, 3))
    expect_close(wire.logprobs(model_id, 4, server.lesson), in_order(server), 1e-6, "log-probs after the step")


@check
def resent_step(server: ServerUnderTest) -> None:
    """a step that is sent again, before and after it was done, is one step"""
    wire, model_id = server.wire, server.model()
    for seq in (1, 2):
        wire.accepted(wire.backward(model_id, seq, [text_datum(server.text(9, seed=seq))]))
    first, again = (wire.accepted(wire.step(model_id, 3)) for _ in range(2))
    result = wire.outcome(first)
    late = wire.accepted(wire.step(model_id, 3))
    expect_equal((again, late), (first, first), "request ids")
    expect_equal(wire.outcome(late), result, "results")
    expect_close(wire.logprobs(model_id, 4, server.lesson), in_order(server), 1e-6, "log-probs after the step")


@check
def resent_create(server: ServerUnderTest) -> None:
    """a model that is asked for again is the same model"""
    wire = server.wire
    session = wire.session()
    first, again = wire.create_model(session, 0), wire.create_model(session, 0)
    expect_equal(wire.accepted(again), wire.accepted(first), "request id")
    model_id = wire.result(first)["model_id"]
    wire.result(wire.backward(model_id, 1, [text_datum(server.lesson)]))
    expect_equal(wire.result(wire.create_model(session, 0))["model_id"], model_id, "model id, later")
    wire.unload(model_id)


@check
def resent_sampling_session(server: ServerUnderTest) -> None:
    """a sampling session that is asked for again is the same"""
    session = server.wire.session()
    ids = {server.wire.sampling_session(session, 1).json()["sampling_session_id"] for _ in range(2)}
    expect_equal(len(ids), 1, "sampling sessions")


@check
def resent_sample(server: ServerUnderTest) -> None:
    """a sample that is sent again has the same request id and the same tokens, without a seed too"""
    wire = server.wire
    sampler_id = wire.sampling_session(wire.session()).json()["sampling_session_id"]
    body = {"sampling_session_id": sampler_id, "seq_id": 1, "prompt": text(server.text(5))}
    body |= {"sampling_params": {"max_tokens": 8, "stop": []}, "type": "sample"}
    answers = [wire.post("asample", body) for _ in range(2)]
    ids = [wire.accepted(answer) for answer in answers]
    expect_equal(ids[1], ids[0], "request id")
    expect_equal(answers[1].json()["sample_sequence_ids"], answers[0].json()["sample_sequence_ids"], "sequence ids")
    expect_equal(wire.outcome(ids[1]), wire.outcome(ids[0]), "results")


@check
def samples_in_any_order(server: ServerUnderTest) -> None:
    """samples have no order: one with a later seq does not wait for an earlier one"""
    wire = server.wire
    sampler_id = wire.sampling_session(wire.session()).json()["sampling_session_id"]
    wire.result(wire.sample(server.text(5), sampling_session_id=sampler_id, seq_id=7))


@check
def resent_save(server: ServerUnderTest) -> None:
    """a save that is sent again is one save, and no clash of names"""
    wire, model_id = server.wire, server.model()
    name = wire.fresh("again")
    first, again = (wire.accepted(wire.save(model_id, 1, name)) for _ in range(2))
    expect_equal(again, first, "request id")
    expect_equal(wire.outcome(first).get("path"), f"tinker://{model_id}/weights/{name}", "path")


@check
def reused_seq(server: ServerUnderTest) -> None:
    """a seq that comes again with other content is refused, and the request that it belongs to stands"""
    wire, model_id = server.wire, server.model()
    first = wire.accepted(wire.backward(model_id, 1, [text_datum(server.text(9, seed=1))]))
    expect_refused(wire.backward(model_id, 1, [text_datum(server.text(9, seed=2))]))
    expect_refused(wire.step(model_id, 1))
    wire.outcome(first)
    expect_refused(wire.backward(model_id, 1, [text_datum(server.text(9, seed=2))]))
    wire.result(wire.backward(model_id, 2, [text_datum(server.text(9, seed=2))]))
    wire.result(wire.step(model_id, 3))
    expect_close(wire.logprobs(model_id, 4, server.lesson), in_order(server), 1e-6, "log-probs after the step")
    sampler_id = wire.sampling_session(wire.session()).json()["sampling_session_id"]
    sampled = wire.accepted(wire.sample(server.text(5), sampling_session_id=sampler_id, seq_id=1))
    expect_refused(wire.sample(server.text(6), sampling_session_id=sampler_id, seq_id=1))
    wire.outcome(sampled)
    expect_refused(wire.sample(server.text(6), sampling_session_id=sampler_id, seq_id=1))


@check
def refused_seq_does_not_block(server: ServerUnderTest) -> None:
    """a refused request uses up its seq: what comes after it is not held up, and what it was has no effect"""
    wire, model_id = server.wire, server.model()
    wire.result(wire.backward(model_id, 1, [text_datum(server.text(9, seed=1))]))
    expect_refused(wire.backward(model_id, 2, []))
    wire.result(wire.backward(model_id, 3, [text_datum(server.text(9, seed=2))]))
    expect_refused(wire.step(model_id, 4, learning_rate="fast"))
    wire.result(wire.step(model_id, 5))
    expect_close(wire.logprobs(model_id, 6, server.lesson), in_order(server), 1e-6, "log-probs after the step")


@check
def refused_before_its_turn(server: ServerUnderTest) -> None:
    """one that is refused before its turn has come holds nothing up either"""
    wire, model_id = server.wire, server.model()
    three = wire.accepted(wire.backward(model_id, 3, [text_datum(server.lesson)]))
    expect_refused(wire.backward(model_id, 2, []))
    wire.result(wire.backward(model_id, 1, [text_datum(server.lesson)]))
    expect("error" not in wire.outcome(three), "seq 3 failed")


@check
def save_sees_what_came_before(server: ServerUnderTest) -> None:
    """a save submitted after a step has the weights after it, even if it arrives early"""
    wire, model_id = server.wire, server.model()
    saving = wire.accepted(wire.save(model_id, 3, wire.fresh("behind")))
    wire.accepted(wire.step(model_id, 2))
    wire.accepted(wire.backward(model_id, 1, [text_datum(server.lesson)]))
    path = wire.outcome(saving)["path"]
    wanted = wire.logprobs(model_id, 4, server.lesson)
    wire.result(wire.load(model_id, 5, path))
    expect_equal(wire.logprobs(model_id, 6, server.lesson), wanted, "log-probs")
    first = wire.logprobs(server.model(), 1, server.lesson)
    expect(first != wanted, "the step did nothing")
