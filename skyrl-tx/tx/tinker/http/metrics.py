"""Prometheus metrics: request metrics are counted here, all others are collected at each scrape."""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

disable_created_metrics()  # a second series for each, of when it began

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds. Up to a poll's half minute."""


class CountsSomething(Protocol):
    def metrics(self) -> dict[str, Any]: ...


PUBLIC = ("engine_ready", "engine_deaths_total")
"""Numbers of the whole server that every tenant may see."""


class Metrics:
    """
    Args:
        sources: components whose metrics are exported with the request metrics
    """

    def __init__(self, *sources: CountsSomething):
        self._sources = sources
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tx_http_requests", "Requests answered", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tx_http_request_seconds",
            "From the first byte of the request to the last byte of its response",
            ["method", "route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        for source in sources:
            self.registry.register(_Numbers(source))

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def render_for_tenant(self, tenant: str) -> bytes:
        """Return a tenant's own numbers, and the few that concern everybody."""
        registry = CollectorRegistry()
        for source in self._sources:
            registry.register(_Numbers(source, tenant))
        return generate_latest(registry)


class _Numbers(Collector):
    """`name: number` becomes `tx_name`; `name: {tenant: number}` the same with a label. Names that end in `_total` are
    counters.

    Args:
        tenant: show only this tenant's numbers and `PUBLIC`; None: all numbers
    """

    def __init__(self, source: CountsSomething, tenant: str | None = None):
        self.source, self.tenant = source, tenant

    def collect(self) -> Iterable[Metric]:
        for name, value in self.source.metrics().items():
            by_tenant = isinstance(value, dict)
            if self.tenant is not None and not by_tenant and name not in PUBLIC:
                continue
            numbers: dict[str, float] = value if by_tenant else {"": value}
            if by_tenant and self.tenant is not None:
                numbers = {self.tenant: value.get(self.tenant, 0)}
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"tx_{name}", name.replace("_", " "), labels=["tenant"] if by_tenant else [])
            for label, number in numbers.items():
                family.add_metric([label] if by_tenant else [], float(number))
            yield family


class Measured:
    """ASGI middleware that counts requests by route pattern: URLs contain ids, each of which would become a time
    series.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = time.perf_counter()
        status = 499  # the client disconnected

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watching)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.record(scope["method"], route, status, time.perf_counter() - started)
