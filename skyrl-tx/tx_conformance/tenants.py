"""Checks of isolation between tenants."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from tx_conformance.archive import archive_url
from tx_conformance.checks import Skip, check, expect, expect_close, expect_equal, expect_refused
from tx_conformance.client import Service
from tx_conformance.server import ServerUnderTest
from tx_conformance.wire import Wire, text_datum

HIDDEN = (403, 404)
STALLED, ANNOUNCED_BYTES = 16, 64 * 2**20


def stranger(server: ServerUnderTest) -> Wire:
    """Another tenant's wire."""
    if not server.target.second_key:
        raise Skip("no --second-api-key")
    return Wire(server.target.base_url, server.target.second_key, server.target.model)


@check
def keys_are_checked(server: ServerUnderTest) -> None:
    """a server with keys rejects a missing or unknown key with 401 before anything else"""
    stranger(server)
    url = f"{server.target.base_url}/api/v1/create_session"
    for headers in ({}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": ""}):
        answer = httpx.post(url, json={"tags": []}, headers=headers, trust_env=False)
        expect_equal(answer.status_code, 401, f"with {headers}")


@check
def models_are_ones_own(server: ServerUnderTest) -> None:
    """another tenant's model cannot be looked at, trained, saved or unloaded"""
    other, model = stranger(server), server.model()
    attempts = {
        "get_info": other.post("get_info", {"model_id": model, "type": "get_info"}),
        "forward_backward": other.backward(model, 1, [text_datum(server.lesson)]),
        "optim_step": other.step(model, 1),
        "save_weights": other.save(model, 1, "mine-now"),
        "save_weights_for_sampler": other.save_for_sampler(model, 1, path="mine-now"),
        "unload_model": other.post("unload_model", {"model_id": model, "type": "unload_model"}),
        "training_runs": other.call("GET", f"training_runs/{model}"),
        "checkpoints": other.call("GET", f"training_runs/{model}/checkpoints"),
    }
    for name, answer in attempts.items():
        expect(answer.status_code in HIDDEN, f"{name}: {answer.status_code} {answer.text[:120]}")
    server.wire.result(server.wire.backward(model, 1, [text_datum(server.lesson)]))  # its seq 1 is still its own


@check
def sessions_are_ones_own(server: ServerUnderTest) -> None:
    """another tenant's session cannot be kept alive, ended, looked at or used"""
    other, session = stranger(server), server.wire.session()
    attempts = {
        "heartbeat": other.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}),
        "finish": other.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}),
        "get": other.call("GET", f"sessions/{session}"),
        "create_model": other.create_model(session),
        "create_sampling_session": other.sampling_session(session),
    }
    for name, answer in attempts.items():
        expect(answer.status_code in HIDDEN, f"{name}: {answer.status_code} {answer.text[:120]}")
    server.wire.answer("POST", "session_heartbeat", {"session_id": session, "type": "session_heartbeat"})


@check
def results_are_ones_own(server: ServerUnderTest) -> None:
    """another tenant's request id is unknown, whether it was done, is under way, or has been fetched"""
    other, wire, model = stranger(server), server.wire, server.model()
    ids = {
        "a sample": wire.accepted(wire.sample(server.text(4))),
        "a pass": wire.accepted(wire.backward(model, 1, [text_datum(server.lesson)])),
        "a step that waits": wire.accepted(wire.step(model, 3)),
    }
    for fetched in (False, True):
        for name, request_id in ids.items():
            answer = other.post("retrieve_future", {"request_id": request_id})
            expect_equal(answer.status_code, 404, f"polling {name}, fetched: {fetched}")
        for name in ("a sample", "a pass"):
            wire.outcome(ids[name])


@check
def seqs_are_ones_own(server: ServerUnderTest) -> None:
    """a wrong request of another tenant uses up no seq of a model"""
    other, wire, model = stranger(server), server.wire, server.model()
    expect(other.backward(model, 1, []).status_code in (400, 422, *HIDDEN), "an empty pass was accepted")
    expect(other.step(model, 1, learning_rate="fast").status_code in (400, 422, *HIDDEN), "a wrong step was accepted")
    wire.result(wire.backward(model, 1, [text_datum(server.lesson)]))


@check
def samplers_are_ones_own(server: ServerUnderTest) -> None:
    """another tenant's sampler cannot be sampled from or looked up"""
    other, wire = stranger(server), server.wire
    sampler = wire.sampling_session(wire.session()).json()["sampling_session_id"]
    expect_refused(other.sample(server.text(4), sampling_session_id=sampler, seq_id=1), statuses=HIDDEN)
    expect_refused(other.call("GET", f"samplers/{sampler}"), statuses=HIDDEN)
    wire.result(wire.sample(server.text(4), sampling_session_id=sampler, seq_id=1))


@check
def listings_are_ones_own(server: ServerUnderTest) -> None:
    """lists of runs, checkpoints and sessions contain only the caller's"""
    other, wire = stranger(server), server.wire
    session = wire.session()
    model = wire.result(wire.create_model(session))["model_id"]
    path = wire.result(wire.save(model, 1, "listed"))["path"]
    wire.unload(model)
    lists = "".join(str(other.answer("GET", at)) for at in ("training_runs?limit=100", "checkpoints", "sessions"))
    for mine in (model, path, session):
        expect(mine not in lists, f"{mine} is in another tenant's lists")


@check
def checkpoints_are_ones_own(server: ServerUnderTest) -> None:
    """another tenant's checkpoint cannot be loaded, fetched, deleted or changed, until it is published"""
    other, wire, model = stranger(server), server.wire, server.model()
    path = wire.result(wire.save(model, 1, "secret"))["path"]
    sampler_path = wire.result(wire.save_for_sampler(model, 2, path="secret"))["path"]
    theirs = other.model()
    at = f"training_runs/{model}/checkpoints/weights/secret"
    attempts = {
        "load_weights": other.load(theirs, 1, path),
        "load_weights as a model": _loaded_anew(other, path),
        "weights_info": other.post("weights_info", {"tinker_path": path}),
        "sampling session": other.sampling_session(other.session(), model_path=sampler_path),
        "sample": other.sample(server.text(4), model_path=sampler_path),
        "archive": other.call("GET", f"{at}/archive"),
        "external_weights_urls": other.call("GET", f"{at}/external_weights_urls"),
        "delete": other.call("DELETE", at),
        "ttl": other.call("PUT", f"{at}/ttl", {"ttl_seconds": 7200}),
        "publish": other.post(f"{at}/publish"),
    }
    for name, answer in attempts.items():
        expect(answer.status_code in HIDDEN, f"{name}: {answer.status_code} {answer.text[:120]}")
    expect(wire.post(f"{at}/publish").is_success, "publish")
    expect(other.post("weights_info", {"tinker_path": path}).is_success, "weights_info of a published checkpoint")
    other.result(other.load(theirs, 2, path))
    expect(other.call("DELETE", at).status_code in HIDDEN, "a published checkpoint was deleted by another tenant")
    other.unload(theirs)


def _loaded_anew(wire: Wire, path: str) -> httpx.Response:
    body = {"session_id": wire.session(), "model_seq_id": 0, "path": path, "optimizer": False, "type": "load_weights"}
    return wire.post("load_weights", body)


@check
def stalled_uploads(server: ServerUnderTest) -> None:
    """stalled uploads of one tenant do not block others: heartbeats and passes are answered meanwhile"""
    other, wire = stranger(server), server.wire
    session, model = wire.session(), server.model()
    begun, may_end = threading.Semaphore(0), threading.Event()

    def content() -> Iterator[bytes]:
        yield b"{"
        begun.release()
        may_end.wait(60)

    def upload() -> None:
        headers = {"Content-Type": "application/json", "Content-Length": str(ANNOUNCED_BYTES)}
        with suppress(httpx.HTTPError):  # it ends sooner than it said
            other.http.post(f"{other.base_url}/api/v1/forward_backward", content=content(), headers=headers)

    with ThreadPoolExecutor(STALLED) as uploads:
        try:
            for _ in range(STALLED):
                uploads.submit(upload)
            for _ in range(STALLED):
                expect(begun.acquire(timeout=30), "an upload could not begin")
            beat = {"session_id": session, "type": "session_heartbeat"}
            answer = wire.http.post(f"{wire.base_url}/api/v1/session_heartbeat", json=beat)
            expect_equal(answer.status_code, 200, "heartbeat")
            wire.result(wire.backward(model, 1, [text_datum(server.lesson)]))
        finally:
            may_end.set()


@check
def archives_are_signed(server: ServerUnderTest) -> None:
    """the address of an archive works for that archive alone: changed in any part, it is refused"""
    wire, model = server.wire, server.model()
    path = wire.result(wire.save(model, 1, wire.fresh("signed")))["path"]
    address = httpx.URL(archive_url(wire, path))
    if not address.query:
        raise Skip("the address has no parts that could be changed")
    expect(httpx.get(address, trust_env=False).is_success, "the archive is not at its address")
    for name, value in address.params.items():
        if value:
            changed = address.copy_set_param(name, value[:-1] + ("0" if value[-1] != "0" else "1"))
            answer = httpx.get(changed, trust_env=False)
            expect(answer.status_code in (400, *HIDDEN, 410), f"with another {name}: {answer.status_code}")


@check
def published_state_can_be_resumed(server: ServerUnderTest) -> None:
    """a published state can be resumed by another tenant's SDK, and no more once it is private again"""
    stranger(server)
    adapter = server.adapter()
    path = adapter.save(server.wire.fresh("shared"))
    at = f"training_runs/{adapter.id}/checkpoints/{path.split('/', 3)[3]}/publish"
    expect(server.wire.post(at).is_success, "publish")
    other = Service(server.target.base_url, server.target.second_key or "")
    theirs = other.resume(path)
    expect_close(theirs.logprobs(server.lesson), adapter.logprobs(server.lesson), 0, "log-probs")
    stranger(server).unload(theirs.id)
    expect(server.wire.call("DELETE", at).is_success, "unpublish")
    expect_refused(stranger(server).post("weights_info", {"tinker_path": path}), statuses=HIDDEN)
