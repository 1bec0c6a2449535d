"""HTTP requests restricted to public addresses, after name resolution and redirects."""

import asyncio
import ipaddress
import socket

import httpx

from skyrl_gym.services import certificates

_EMBEDS_IPV4 = [
    ipaddress.ip_network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
]


class PrivateAddress(httpx.UnsupportedProtocol):
    """A page on this machine or its network."""


class PublicTransport(httpx.AsyncHTTPTransport):
    """HTTP transport that resolves each request's host itself and connects to the very address it has checked."""

    def __init__(self) -> None:
        # Connections are pooled by address: a kept connection would serve another name at the same address.
        super().__init__(verify=certificates(), limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        address = await _resolve_public_address(host, request.url.port or {"http": 80}.get(request.url.scheme, 443))
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,  # the Host header keeps the name
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return await super().handle_async_request(pinned)


async def _resolve_public_address(host: str, port: int) -> str:
    """Resolve a public address. Raises PrivateAddress, and httpx.ConnectError if the name is unknown."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as failure:
        raise httpx.ConnectError(f"unknown host {host}: {failure}") from failure
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    public = [address for address in addresses if is_public(address)]
    if not public:
        raise PrivateAddress(f"{host} is not on the public internet")
    return public[0]


def is_public(address: str) -> bool:
    """Return whether an address is public. Forms that embed an IPv4 address are not: routing decides their target."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif any(ip in network for network in _EMBEDS_IPV4):
            return False
    return ip.is_global and not ip.is_multicast
