"""The search tool against a server that misbehaves as servers do."""

import gc
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.services import connections_to
from skyrl_gym.tools import search as search_module
from skyrl_gym.tools.search import SearchToolGroup, call_search_api

from .scripted_server import serving, unused_url

GOOD = {"result": [[{"document": {"id": "1", "contents": " Paris is in France. "}, "score": 2.0}]]}


@pytest.fixture
def hurried(monkeypatch) -> None:
    """Back-off a hundred times as fast."""
    monkeypatch.setattr(search_module, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(search_module, "MAX_RETRY_DELAY", 0.08)


def test_query_request_format_and_numbered_documents():
    two = {"result": [[*GOOD["result"][0], {"document": {"contents": "Rome is in Italy."}, "score": 1.0}]]}
    with serving((200, two)) as server:
        tools = SearchToolGroup(search_url=server.url, topk=2)
        answer = tools.execute_tool("search", "  capital of France\n")
        assert server.requests == [{"query": "capital of France", "topk": 2, "return_scores": True}]
    assert json.loads(answer) == {"result": "Doc 1: Paris is in France.\nDoc 2: Rome is in Italy.\n"}


@pytest.mark.parametrize(
    "answer, expected",
    [
        ({"result": []}, "No search results found."),
        ({"result": [[]]}, "No search results found."),
        ({"result": [[{"contents": "bare"}]]}, "Doc 1: bare\n"),
        ({"result": [[{"contents": "a"}], [{"contents": "b"}]]}, "Doc 1: a\n\n---\nDoc 1: b\n"),
    ],
)
def test_model_reads_documents(answer, expected):
    with serving((200, answer)) as server:
        assert json.loads(SearchToolGroup(search_url=server.url).search("q"))["result"] == expected


@pytest.mark.parametrize(
    "body",
    [
        b"<html>login</html>",
        b"",
        {"error": "index not loaded"},
        {"result": None},
        {"answer": 1},
        [],
        None,
        {"result": [[{"document": {"title": "T", "text": "no contents"}}]]},
        {"result": [[{"document": {"contents": None}}]]},
    ],
)
def test_unreadable_body_with_status_200_is_infra_error(body):
    with serving((200, body)) as server, pytest.raises(InfraError):
        SearchToolGroup(search_url=server.url).search("q")


def test_empty_query_sends_no_request():
    assert SearchToolGroup(search_url=unused_url()).search(None) == ""


@pytest.mark.parametrize(
    "status, body, expected",
    [
        (422, {"detail": "query: too long"}, "Search error: HTTP 422: query: too long"),
        (400, b"bad", "Search error: HTTP 400: bad"),
    ],
)
def test_request_fault_is_reported_without_retry(status, body, expected):
    with serving((status, body)) as server:
        text = json.loads(SearchToolGroup(search_url=server.url).search("q"))["result"]
        assert len(server.requests) == 1
    assert text.startswith(expected)


def test_lasting_fault_raises_infra_error_after_ten_requests(hurried):
    with serving((503, {"detail": "no index"})) as server:
        with pytest.raises(InfraError, match="no index") as caught:
            SearchToolGroup(search_url=server.url).search("q")
        assert len(server.requests) == 10
    text = str(caught.value)
    assert text.startswith("Search error") and server.url in text and "failed 10 times" in text


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_wrong_address_or_missing_permission_raises_infra_error(status):
    with serving((status, {"detail": "Not here"})) as server:
        with pytest.raises(InfraError, match=f"^Search error: {server.url} refused: HTTP {status}: Not here"):
            call_search_api(server.url, "q")
        assert len(server.requests) == 1


def test_retries_end_at_deadline():
    started = time.monotonic()
    with pytest.raises(InfraError, match="failed 2 times"):  # after 0.5 to 1 s; the third would be later than 1.2 s
        call_search_api(unused_url(), "q", retry_seconds=1.2)
    assert time.monotonic() - started < 2


def test_lone_surrogate_in_query_is_replaced():
    with serving((200, GOOD)) as server:
        call_search_api(server.url, "a\ud800b")
        assert server.requests[0]["query"] == "a\ufffdb"


def test_invalid_address_is_rejected_before_first_search():
    with pytest.raises(ValueError, match="search_url"):
        SearchToolGroup(search_url="127.0.0.1:8000/retrieve")


def test_groups_of_same_server_share_client_until_last_closes():
    url = "http://127.0.0.1:9/retrieve"
    first, second = SearchToolGroup(search_url=url), SearchToolGroup(search_url=url + "?x=1")
    assert first.session is second.session and first.base_url == "http://127.0.0.1:9"
    assert SearchToolGroup(search_url="http://127.0.0.1:10").session is not first.session
    client = first.session.client
    del first
    gc.collect()
    assert not client.is_closed
    del second
    gc.collect()
    assert client.is_closed
    assert connections_to("http://127.0.0.1:9").client is not client


def test_300_concurrent_searches_do_not_wait_for_connection_pool(caplog):
    with serving((200, GOOD)) as server, ThreadPoolExecutor(300) as threads:
        caplog.set_level(logging.WARNING)
        groups = [SearchToolGroup(search_url=server.url, log_requests=True) for _ in range(300)]
        answers = list(threads.map(lambda group: group.search("q"), groups))
    assert len(answers) == 300 and all("Paris" in answer for answer in answers)
    assert caplog.records == []


def test_requests_are_logged_on_demand_only(caplog, hurried):
    caplog.set_level(logging.INFO, logger="skyrl_gym")
    with serving((500, b""), (200, GOOD), (500, b""), (200, GOOD)) as server:
        call_search_api(server.url, "quiet", log_requests=False)
        assert caplog.records == []
        call_search_api(server.url, "loud", log_requests=True)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
