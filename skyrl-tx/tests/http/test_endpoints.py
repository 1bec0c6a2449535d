"""Answers of endpoints, on a server that computes nothing yet: its engine is still starting."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable

import httpx
import pytest

from tx.tinker.base_model import read_base_model
from tx.tinker.http import responses
from tx.tinker.http.app import create_app
from tx.tinker.http.connections import Connections
from tx.tinker.http.routes import futures
from tx.tinker.storage.folders import Folders
from tx.tinker.wire.codec import decode_training

JSON = {"content-type": "application/json"}


async def said(status: int, asked: Awaitable[httpx.Response]) -> httpx.Response:
    answer = await asked
    assert answer.status_code == status, (answer.request.method, answer.request.url, answer.text)
    return answer


async def session_of(client: httpx.AsyncClient) -> str:
    answer = await said(200, client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}))
    return responses.SessionMade.model_validate_json(answer.content).session_id


async def test_server_reports_capabilities_and_accepts_bounded_telemetry(client):
    assert (await client.get("/healthz")).json() == (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
    answer = await client.get("/api/v1/get_server_capabilities")
    names = {model.model_name for model in responses.Capabilities.model_validate_json(answer.content).supported_models}
    assert "tiny" in names
    flags = (await client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})).json()
    assert flags["pjwt_auth_enabled"] is False
    assert flags["proto_write_fwdbwd"] is True
    assert flags["proto_compress_fwdbwd"] is False  # on loopback
    assert (await client.post("/api/v1/client/dynamic_config", json={})).json()["refresh_interval_sec"] == 300
    events = {"events": [{"event": "x"}], "platform": "linux", "sdk_version": "0", "session_id": "s"}
    assert (await client.post("/api/v1/telemetry", json=events)).json() == {"status": "accepted"}
    assert (await client.post("/api/v1/telemetry", json={"events": ["x" * 5_000_000]})).status_code == 413


async def test_session_lives_until_finished(client):
    session = await session_of(client)
    beat = {"session_id": session, "type": "session_heartbeat"}
    assert (await client.post("/api/v1/session_heartbeat", json=beat)).json() == {"type": "session_heartbeat"}
    listed = await client.get("/api/v1/sessions?limit=5&access_scope=owned")
    assert responses.SessionList.model_validate_json(listed.content).sessions == [session]
    responses.SessionInfo.model_validate_json((await client.get(f"/api/v1/sessions/{session}")).content)
    finish = await client.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert finish.status_code == 200
    assert (await client.post("/api/v1/session_heartbeat", json=beat)).status_code == 410


async def test_missing_objects_are_404(client):
    assert (await client.post("/api/v1/session_heartbeat", json={"session_id": "nobody"})).status_code == 404
    assert (await client.post("/api/v1/retrieve_future", json={"request_id": "nothing"})).status_code == 404
    assert (await client.post("/api/v1/get_info", json={"model_id": "none"})).status_code == 404
    for path in ("sessions/x", "samplers/x", "training_runs/x", "training_runs/x/checkpoints"):
        answer = await said(404, client.get(f"/api/v1/{path}"))
        assert answer.json()["detail"]
    for method, end in (("GET", "/archive"), ("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish")):
        await said(404, client.request(method, f"/api/v1/training_runs/x/checkpoints/weights/y{end}"))


async def pending_sample(client: httpx.AsyncClient) -> responses.SampleAccepted:
    request = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5, 6]}]}, "num_samples": 3}
    answer = await said(200, client.post("/api/v1/asample", json={**request, "sampling_params": {"max_tokens": 4}}))
    return responses.SampleAccepted.model_validate_json(answer.content)


async def test_pending_result_is_408_with_reason(client, monkeypatch):
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.05)
    accepted = await pending_sample(client)
    assert len(accepted.sample_sequence_ids) == 3
    answer = await said(408, client.post("/api/v1/retrieve_future", json={"request_id": accepted.request_id}))
    assert responses.TryAgainLater.model_validate_json(answer.content).request_id == accepted.request_id


async def test_closing_server_answers_polls_immediately(client):
    accepted = await pending_sample(client)
    poll = asyncio.create_task(client.post("/api/v1/retrieve_future", json={"request_id": accepted.request_id}))
    polls = client._transport.app.state.polls  # type: ignore[attr-defined]
    while not len(polls):
        await asyncio.sleep(0.01)
    polls.release()
    answer = await said(408, asyncio.wait_for(poll, 5))
    assert "restarting" in responses.TryAgainLater.model_validate_json(answer.content).queue_state_reason


@pytest.mark.parametrize(
    "body, status, says",
    [
        (b"{", 400, "body must be JSON"),
        (b"", 400, "body must be JSON"),
        (b"[1]", 422, "body: "),
        (b"{}", 422, "session_id: "),
        (b'{"session_id": 5}', 422, "session_id: .*got 5"),
        (b'{"session_id": "\\u0000"}', 422, "session_id"),
        (b'{"session_id": "\xff"}', 400, "body must be JSON"),
        (b"[" * 100_000, 400, "body must be JSON"),
    ],
)
async def test_invalid_body_error_names_problem(client, body, status, says):
    answer = await said(status, client.post("/api/v1/session_heartbeat", content=body, headers=JSON))
    assert re.search(says, answer.json()["detail"])


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/x-protobuf"]
)
async def test_other_content_types_than_json_are_refused(client, content_type):
    headers = {"content-type": content_type} if content_type else {}
    answer = await said(415, client.post("/api/v1/session_heartbeat", content=b'{"session_id": "x"}', headers=headers))
    assert "application/json" in answer.json()["detail"]


async def test_unknown_addresses_and_methods_are_named(client):
    answer = await client.get("/api/v1/forward_bakward")
    assert (answer.status_code, "GET /api/v1/forward_bakward" in answer.json()["detail"]) == (404, True)
    answer = await said(405, client.get("/api/v1/asample"))
    assert answer.headers["allow"] == "POST"
    answer = await client.get("/api/v1/training_runs/x/checkpoints/weights/y/publish")
    assert answer.headers["allow"] == "DELETE, POST"
    answer = await client.post("/api/v1/cancel_future", json={"request_id": "x"})
    assert (answer.status_code, "this server does not have cancel_future" in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "offset=-1", f"offset={2**70}"])
async def test_pages_have_limits(client, query):
    answer = await said(422, client.get(f"/api/v1/training_runs?{query}"))
    assert answer.json()["detail"].startswith(query.split("=")[0])


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fx", "a%00b", ".hidden", "a%0Ab", "x" * 300])
async def test_names_escaping_folder_are_refused(client, name):
    answer = await client.get(f"/api/v1/training_runs/run/checkpoints/weights/{name}/archive")
    assert answer.status_code in (404, 422)


async def test_body_larger_than_declared_limit_is_not_read(client):
    read = 0

    async def pieces():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 65536

    headers = {**JSON, "content-length": str(65536 * 1000)}
    answer = await said(413, client.post("/api/v1/forward_backward", content=pieces(), headers=headers))
    assert "--max-body-mb" in answer.json()["detail"]
    assert read <= 1000


async def test_body_of_unknown_length_is_read_up_to_limit(client):
    async def pieces():
        for _ in range(100):
            yield b"x" * 65536

    await said(413, client.post("/api/v1/forward_backward", content=pieces(), headers=JSON))


async def test_hosted_loss_is_refused_without_configured_substitute(served, service):
    plain, standing_in = await served(), await served(stable_reinforce_as="importance_sampling")
    session, lora = await session_of(plain), {"rank": 4}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    model = (await said(200, plain.post("/api/v1/create_model", json=asked))).json()["model_id"]
    tensors = {"target_tokens": ([6, 7], "int64"), "logprobs": ([-1, -2], "float32"), "advantages": ([1, 1], "float32")}
    inputs = {name: {"data": data, "dtype": dtype, "shape": [2]} for name, (data, dtype) in tensors.items()}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "loss_fn_inputs": inputs}
    body = {"model_id": model, "forward_backward_input": {"data": [datum], "loss_fn": "stable_reinforce"}}
    refused = await said(400, plain.post("/api/v1/forward_backward", json=body | {"seq_id": 1}))
    assert "--stable-reinforce-as importance_sampling" in refused.json()["detail"]
    accepted = await said(200, standing_in.post("/api/v1/forward_backward", json=body | {"seq_id": 2}))
    command = service.state.pending[accepted.json()["request_id"]].stored.command
    assert decode_training(command.payload).loss_fn == "importance_sampling"


async def test_every_route_needs_key_when_keys_exist(served):
    nobody = await served("nobody")
    for method, path in (("POST", "/api/v1/create_session"), ("GET", "/api/v1/nowhere"), ("GET", "/openapi.json")):
        answer = await said(401, nobody.request(method, path))
        assert "X-API-Key" in answer.json()["detail"]
    stranger = await served("stranger")
    assert "unknown" in (await stranger.get("/api/v1/sessions")).json()["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_health_is_open_and_metrics_need_key(served, host):
    nobody, anna = await served("nobody", host=host), await served("anna")
    for path, without_key in (("/healthz", 200), ("/api/v1/healthz", 200), ("/metrics", 401)):
        assert (await nobody.get(path)).status_code == without_key, path
        assert (await anna.get(path)).status_code == 200, path


async def test_key_sees_own_tenant_and_admin_key_sees_all(served):
    anna, bela, admin = await served("anna"), await served("bela"), await served("admin")
    for client in (anna, bela):
        await session_of(client)
    metrics = {client: (await client.get("/metrics")).text for client in (anna, bela, admin)}
    for client, own, other in ((anna, "anna", "bela"), (bela, "bela", "anna")):
        assert f'tx_sessions{{tenant="{own}"}} 1.0' in metrics[client] and "tx_engine_ready" in metrics[client]
        assert other not in metrics[client]
        for of_all in ("tx_http_requests", "tx_connections"):
            assert of_all not in metrics[client]
    for name in ("anna", "bela"):
        assert f'tx_sessions{{tenant="{name}"}} 1.0' in metrics[admin]
    assert "tx_http_requests_total" in metrics[admin] and "tx_connections_limit" in metrics[admin]


async def test_metrics_and_limits_count_connections_of_web_server(config, service):
    folders = Folders(config.checkpoints_base, config.state_folder / "cache")
    app = create_app(service, config, read_base_model(config.base_model), folders, connections=Connections(4))
    assert app.state.connections.limit == 4, "there are none yet: a server that has just started"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        assert "tx_connections_limit 4.0" in (await client.get("/metrics")).text


async def test_objects_of_another_tenant_do_not_exist(served):
    anna, bela = await served("anna"), await served("bela")
    session = await session_of(anna)
    assert (await anna.post("/api/v1/session_heartbeat", json={"session_id": session})).status_code == 200
    assert (await bela.post("/api/v1/session_heartbeat", json={"session_id": session})).status_code == 404
    assert (await bela.get(f"/api/v1/sessions/{session}")).status_code == 404
    assert session not in (await bela.get("/api/v1/sessions")).json()["sessions"]


async def test_unexpected_error_has_id_and_delays_retries(client, service, caplog):
    session = await session_of(client)
    await service.close()  # closes the database under the running app
    with caplog.at_level(logging.CRITICAL):
        answer = await client.get(f"/api/v1/sessions/{session}")
        poll = await client.post("/api/v1/retrieve_future", json={"request_id": "x"})
    if answer.status_code == 500:  # the service may know it without its database
        assert "error " in answer.json()["detail"]
    assert poll.status_code in (404, 429)
    if poll.status_code == 429:
        assert int(poll.headers["retry-after"]) >= 1


async def test_server_metrics_can_be_scraped(client):
    await session_of(client)
    await client.get("/nowhere/x")
    text = (await client.get("/metrics")).text
    assert 'tx_http_requests_total{method="POST",route="/api/v1/create_session",status="200"} 1.0' in text
    assert 'route="none",status="404"' in text
    assert "/nowhere" not in text  # addresses would make a series each
    assert "tx_http_request_seconds_bucket" in text


async def test_openapi_document_lists_every_endpoint(client):
    description = (await client.get("/openapi.json")).json()
    known = set(description["paths"])
    app = client._transport.app  # type: ignore[attr-defined]
    for route in app.routes:
        if getattr(route, "include_in_schema", False):
            assert route.path in known
    text = json.dumps(description)
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"')[0].removeprefix("#/components/schemas/")
        assert name in description["components"]["schemas"], name


async def test_openai_request_bounds_completions_and_tokens(client):
    answer = await client.post(
        "/oai/api/v1/completions", json={"model": "tiny", "prompt": [5, 6], "max_tokens": 10**30}
    )
    assert 400 <= answer.status_code < 500 and "max_tokens" in answer.text
    for asked in ({"prompt": [[5]] * 1025}, {"prompt": [[5]] * 9, "n": 128}):
        answer = await client.post("/oai/api/v1/completions", json={"model": "tiny", "max_tokens": 1} | asked)
        assert answer.status_code == 400, answer.text
        assert "Split them over several requests" in answer.text
