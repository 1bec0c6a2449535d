"""Checks of session and adapter life cycles."""

import numpy as np

from tx_conformance.checks import check, expect, expect_close, expect_equal, expect_far, expect_refused
from tx_conformance.client import Service, done, text_datum
from tx_conformance.server import ServerUnderTest


@check
def healthz(server: ServerUnderTest) -> None:
    """the server says that it is well"""
    expect_equal(server.wire.answer("GET", "healthz").get("status"), "ok", "status")


@check
def capabilities(server: ServerUnderTest) -> None:
    """capabilities name the model, to the SDK too"""
    models = server.wire.answer("GET", "get_server_capabilities")["supported_models"]
    expect(server.target.model in [model["model_name"] for model in models], f"not among {models}")
    expect(server.target.model in server.service.model_names(), "the SDK does not see it")


@check
def client_config(server: ServerUnderTest) -> None:
    """a client receives its settings, and is not redirected to another token service"""
    config = server.wire.answer("POST", "client/config", {"sdk_version": "0.38.0"})
    expect(not config.get("pjwt_auth_enabled"), "pjwt_auth_enabled is on: keys would be exchanged at /auth/token")
    dynamic = server.wire.post("client/dynamic_config", {"sdk_version": "0.38.0"})
    expect(dynamic.status_code in (200, 404), f"client/dynamic_config: {dynamic.status_code}")


@check
def session_lives_and_ends(server: ServerUnderTest) -> None:
    """a session beats until it is finished; then its heart answers 410"""
    wire = server.wire
    session = wire.session()
    beat = {"session_id": session, "type": "session_heartbeat"}
    expect_equal(wire.answer("POST", "session_heartbeat", beat).get("type"), "session_heartbeat", "type")
    ended = wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": "all done"})
    expect(ended.is_success, f"finish: {ended.status_code} {ended.text}")
    expect_equal(wire.post("session_heartbeat", beat).status_code, 410, "heartbeat after the end")
    again = wire.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}})
    expect(again.is_success, f"to finish twice is harmless, but: {again.status_code}")


@check
def unknown_session(server: ServerUnderTest) -> None:
    """the heartbeat of a session that never was is 404, and a model in it is refused"""
    beat = {"session_id": "session_never_was", "type": "session_heartbeat"}
    expect_equal(server.wire.post("session_heartbeat", beat).status_code, 404, "heartbeat")
    expect_refused(server.wire.create_model("session_never_was"), "session")


@check
def refused_heartbeat(server: ServerUnderTest) -> None:
    """a heartbeat that is refused ends nothing: the next one is welcome, and a model can be made"""
    wire = server.wire
    session = wire.session()
    for body in (b"{", b"{}", b'{"session_id": 5}'):
        answer = wire.post("session_heartbeat", content=body, headers={"Content-Type": "application/json"})
        expect_refused(answer)
    wire.answer("POST", "session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    wire.unload(wire.result(wire.create_model(session))["model_id"])


@check
def ended_session_takes_no_model(server: ServerUnderTest) -> None:
    """nothing is created in a session that is over"""
    session = server.wire.session()
    server.wire.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
    expect_refused(server.wire.create_model(session), statuses=(400, 404, 410))


@check
def two_sessions(server: ServerUnderTest) -> None:
    """a second service client is a second session with separate adapters"""
    other = Service(server.target.base_url, server.target.api_key, user_metadata={"made_by": "contract"})
    one, two = server.adapter(), server.keep(other.adapter(server.target.model, rank=4, seed=7, train_unembed=False))
    expect(one.id != two.id, "both adapters have one id")
    expect_equal(
        two.logprobs(server.lesson)[0].tolist(), one.logprobs(server.lesson)[0].tolist(), "same seed, log-probs"
    )
    close = getattr(other.client, "close", None)
    if close is not None:
        done(close("success"))


@check
def create_and_info(server: ServerUnderTest) -> None:
    """a new adapter knows its id, rank, base model and tokenizer"""
    adapter = server.adapter(rank=8)
    info = adapter.info()
    expect_equal(info.model_id, adapter.id, "model_id")
    expect_equal((info.is_lora, info.lora_rank), (True, 8), "is_lora, lora_rank")
    expect_equal(info.model_data.model_name or info.model_name, server.target.model, "model_name")
    expect(info.model_data.tokenizer_id, "no tokenizer_id: clients cannot find the tokenizer")


@check
def model_id_is_derived(server: ServerUnderTest) -> None:
    """the id of a model is `SESSION:train:SEQ`, which newer clients work out for themselves"""
    session = server.wire.session()
    created = server.wire.result(server.wire.create_model(session, 3))
    expect_equal(created["model_id"], f"{session}:train:3", "model_id")
    server.wire.unload(created["model_id"])


@check
def tokenizer(server: ServerUnderTest) -> None:
    """the tokenizer the server names can be loaded and gives back what it takes"""
    text = server.tokenizer.decode(server.tokenizer.encode("hello 42", add_special_tokens=False))
    expect("hello" in text.lower() and "42" in text, f"'hello 42' came back as {text!r}")


@check
def fresh_adapter_is_the_base(server: ServerUnderTest) -> None:
    """an adapter that has learned nothing is the base model, whatever its seed and rank"""
    base = server.service.sampler(base_model=server.target.model).logprobs(server.lesson)[1:]
    for lora in ({"seed": 7}, {"seed": 8, "rank": 16}):
        fresh = server.adapter(**lora).logprobs(server.lesson)[0]
        expect_close(fresh, base, 2e-3, f"log-probs of {lora}")


@check
def seed_decides(server: ServerUnderTest) -> None:
    """two adapters of one seed learn alike to the bit; one of another seed does not"""
    after = []
    for seed in (7, 7, 8):
        adapter = server.adapter(seed=seed)
        for _ in range(2):
            adapter.backward([text_datum(server.lesson)])
            adapter.step(learning_rate=1e-2)
        after.append(adapter.logprobs(server.lesson)[0])
    expect(np.array_equal(after[0], after[1]), f"same seed: off by {np.max(np.abs(after[0] - after[1])):.3g}")
    expect_far(after[0], after[2], 1e-5, "another seed")


@check
def unload(server: ServerUnderTest) -> None:
    """requests for an unloaded adapter are refused immediately"""
    wire = server.wire
    model_id = wire.model()
    result = wire.result(wire.post("unload_model", {"model_id": model_id, "type": "unload_model"}))
    expect_equal(result.get("model_id"), model_id, "model_id")
    expect_refused(wire.step(model_id, 1), statuses=(400, 404, 410))


@check
def unknown_future(server: ServerUnderTest) -> None:
    """a request id that never was is 404"""
    for request_id in ("999999999", "no-such-request", "../../etc/passwd"):
        answer = server.wire.post("retrieve_future", {"request_id": request_id})
        expect_equal(answer.status_code, 404, f"polling {request_id!r}")


@check
def result_can_be_read_twice(server: ServerUnderTest) -> None:
    """a result is still there after it was read: the first answer may have been lost"""
    wire = server.wire
    request_id = wire.accepted(wire.sample(server.text(5)))
    expect_equal(wire.outcome(request_id), wire.outcome(request_id), "second reading")


@check
def telemetry(server: ServerUnderTest) -> None:
    """telemetry is taken, and not answered with an error"""
    session = server.wire.session()
    body = {"events": [], "platform": "test", "sdk_version": "0.38.0", "session_id": session, "process_uuid": "0"}
    answer = server.wire.post("telemetry", body)
    expect(answer.is_success, f"telemetry: {answer.status_code} {answer.text}")
