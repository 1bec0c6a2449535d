"""Services that fail for a moment, for good, slowly, or by saying so."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest

from skyrl_gym import services
from skyrl_gym.error import InfraError
from skyrl_gym.services import Cancelled, Retries, Service, connections_to

from .scripted_server import serving, unused_url

GOOD = (200, {"ok": True})
HURRIED = Retries(attempts=10, first_wait=0.01, longest_wait=0.05)


@pytest.mark.parametrize("fault", [(408, b""), (409, b""), (429, b""), (500, b""), (503, b"busy"), (599, b""), "drop"])
def test_passing_failures_are_retried(fault):
    with serving(fault, fault, fault, GOOD) as server:
        response = Service(server.url, retries=HURRIED).request({"question": "\ud800"})
        assert (response.status, response.text, len(server.requests)) == (200, '{"ok": true}', 4)
    assert response.headers["content-length"] == "12"
    assert server.requests[-1] == {"question": "\ud800"}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_other_statuses_are_returned_to_caller(status):
    with serving((status, b"no")) as server:
        response = Service(server.url).request({})
        assert (response.status, response.body, len(server.requests)) == (status, b"no", 1)


def test_lasting_failure_raises_infra_error_with_attempts_and_cause():
    with serving((503, {"detail": "no index"})) as server:
        with pytest.raises(InfraError, match=f"^{server.url} failed 10 times in .* s; last: HTTP 503: .*no index"):
            Service(server.url, retries=HURRIED).request({})
        assert len(server.requests) == 10
    url, started = unused_url(), time.monotonic()
    with pytest.raises(InfraError, match=f"{url} failed 2 times .* ConnectError"):
        Service(url, retries=Retries(2, 0.01)).request({})
    with pytest.raises(InfraError, match="failed 2 times"):  # after 0.5 to 1 s; the third would be later than 1.2 s
        Service(url, retries=Retries(first_wait=1, window=1.2)).request({})
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("header", ["0.4", "in 2 s"])
def test_retry_after_header_is_honored(header):
    # A date has whole seconds: of the one 2 s ahead, more than 1 s is left.
    value, least = (header, 0.4) if header[0].isdigit() else (formatdate(time.time() + 2, usegmt=True), 0.9)
    with serving((429, b"", {"Retry-After": value}), GOOD) as server:
        started = time.monotonic()
        Service(server.url, retries=Retries(2, first_wait=0.01)).request({})
    assert least <= time.monotonic() - started < least + 1.5


@pytest.mark.parametrize("value", ["1e9", "Fri, 31 Dec 9999 23:59:59 GMT", "soon", "-5", "", "²", "nan"])
def test_excessive_or_invalid_retry_after_is_bounded(value):
    with serving((503, b"", {"Retry-After": value.encode().decode("latin-1")}), GOOD) as server:
        started = time.monotonic()
        Service(server.url, retries=Retries(2, first_wait=0.01, longest_wait=0.1)).request({})
    assert time.monotonic() - started < 1


def test_backoff_doubles_with_jitter_up_to_maximum():
    retries = Retries(first_wait=1, longest_wait=8)
    for attempt, longest in (2, 1), (3, 2), (4, 4), (5, 8), (6, 8), (5000, 8):
        waits = {retries.wait_before(attempt, 0) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest


def test_dropped_idle_connection_is_replaced_without_delay():
    with serving(GOOD, "drop", GOOD) as server:
        service = Service(server.url, retries=Retries(first_wait=5))
        service.request({})
        started = time.monotonic()
        assert service.request({}).status == 200
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("slowness", ["hang", "trickle"])
def test_deadline_covers_whole_response(slowness):
    started = time.monotonic()
    with serving(slowness) as server, pytest.raises(InfraError, match=r"0\.3 s"):
        Service(server.url, timeout=0.3, retries=Retries(1)).request({})
    assert time.monotonic() - started < 1.5


def test_endless_response_is_cut_off(monkeypatch):
    monkeypatch.setattr(services, "MAX_BODY_BYTES", 1000)
    with serving((200, b"x" * 2000)) as server:
        with pytest.raises(InfraError, match="1000 bytes"):
            Service(server.url).request({})
        assert len(server.requests) == 1


def test_cancellation_ends_wait():
    cancelled = threading.Event()
    with serving((503, b"")) as server, ThreadPoolExecutor(1) as threads:
        service = Service(server.url, retries=Retries(2, first_wait=60, longest_wait=60), cancelled=cancelled)
        asking = threads.submit(service.request, {})
        while not server.requests:
            time.sleep(0.01)
        cancelled.set()
        with pytest.raises(Cancelled):
            asking.result(5)
        with pytest.raises(Cancelled):
            service.request({})
        assert len(server.requests) == 1


def test_proxy_is_bypassed_for_loopback(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, unused_url())
    with serving(GOOD) as server:
        assert Service(server.url, retries=Retries(1)).request({}).status == 200


def test_services_of_same_host_share_connections_until_last_closes():
    with serving(GOOD) as server:
        first, second = Service(server.url), Service(server.url + "?x=1")
        first.request({})
        second.request({})
        client = connections_to(first._origin).client
        first.close()
        gc.collect()
        assert not client.is_closed
        second.close()
        gc.collect()
        assert client.is_closed
        assert first.request({}).status == 200


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "", "ftp://host/", "http://"])
def test_invalid_address_is_refused_at_once(url):
    with pytest.raises(ValueError, match="base_url"):
        Service(url)
