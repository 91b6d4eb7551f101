"""Decide which addresses a sink may connect to: public ones, and those its destination allows.

Otherwise anyone who can write a URL or answer a DNS query could reach a cloud's metadata service or a
database. Every address is checked, also each that a name resolves to, and the connection goes to exactly that
address. An IPv6 address that wraps an IPv4 address is judged by the wrapped one.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

from relaybox.core.outcome import Unavailable

Address: TypeAlias = IPv4Address | IPv6Address
Lookup: TypeAlias = Callable[[str, int], Awaitable[Iterable[tuple[Any, ...]]]]
"""Returns what ``loop.getaddrinfo`` returns for a name and a port."""

_IPV4 = {
    IPv4Network(network): what
    for network, what in {
        "0.0.0.0/8": "an unspecified address",
        "10.0.0.0/8": "a private address",
        "100.64.0.0/10": "an address of a carrier's own network",
        "127.0.0.0/8": "a loopback address",
        "168.63.129.16/32": "the platform's own address on Azure",
        "169.254.169.254/32": "the metadata service of a cloud",
        "169.254.0.0/16": "a link-local address",
        "172.16.0.0/12": "a private address",
        "192.0.0.0/24": "a reserved address",
        "192.0.2.0/24": "an address for documentation",
        "192.88.99.0/24": "a reserved address",
        "192.168.0.0/16": "a private address",
        "198.18.0.0/15": "an address for benchmarks",
        "198.51.100.0/24": "an address for documentation",
        "203.0.113.0/24": "an address for documentation",
        "224.0.0.0/4": "a multicast address",
        "240.0.0.0/4": "a reserved address",
    }.items()
}
_IPV6 = {
    IPv6Network(network): what
    for network, what in {
        "::/128": "an unspecified address",
        "::1/128": "a loopback address",
        "2001::/23": "a reserved address",
        "2001:db8::/32": "an address for documentation",
        "3fff::/20": "an address for documentation",
        "fd00:ec2::254/128": "the metadata service of a cloud",
        "fd20:ce::254/128": "the metadata service of a cloud",
        "fc00::/7": "a private address",
        "fe80::/10": "a link-local address",
        "fec0::/10": "a site-local address",
        "ff00::/8": "a multicast address",
    }.items()
}
_PUBLIC_IPV6 = IPv6Network("2000::/3")

# The position of the wrapped IPv4 address, in bits from the right.
_WRAPPERS = {
    IPv6Network("::ffff:0:0/96"): 0,
    IPv6Network("::ffff:0:0:0/96"): 0,
    IPv6Network("64:ff9b::/96"): 0,
    IPv6Network("2002::/16"): 80,
}
_TEREDO = IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?", re.ASCII)
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\.?", re.ASCII)


class Guard:
    """Checks the addresses that a destination may connect to."""

    def __init__(self, destination: str, allow: Iterable[str]) -> None:
        self._destination = destination
        self._allow = tuple(ip_network(network) for network in allow)
        self._passed: str | None = None

    def check_host(self, host: str) -> None:
        """Raise ``Unavailable`` if a host is a forbidden address, or not a plain name to every library."""
        if host == self._passed:
            return
        try:
            address = ip_address(host)
        except ValueError:
            self._check_name(host)
        else:
            self.check(address, host)
        self._passed = host

    def check(self, address: Address, host: str) -> None:
        """Raise ``Unavailable`` unless an address of ``host`` is public or allowed."""
        what = self.objection(address)
        if what is None:
            return
        seen = f"{address} is" if host == str(address) else f"{shown(host)} resolves to {address},"
        fix = f"add it to allow of destination {self._destination!r} if events may go there"
        raise Unavailable(f"{seen} {what}; {fix}")

    def objection(self, address: Address) -> str | None:
        """Return why this address is not allowed, or None if it is."""
        if self._allowed(address):
            return None
        if isinstance(address, IPv4Address):
            return _find(address, _IPV4)
        wrapped = list(_wrapped(address))
        for inner in wrapped:
            if not self._allowed(inner) and (what := _find(inner, _IPV4)):
                return f"which stands for {inner}, {what}"
        return None if wrapped else _objection_to_ipv6(address)

    def _allowed(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._allow)

    def _check_name(self, host: str) -> None:
        if len(host) > 254 or not _NAME.fullmatch(host):
            raise Unavailable(f"{shown(host)} is neither a name nor an address; correct the sink's URL")
        if _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
            # Some libraries read 127.1, 0x7f.1 and 2130706433 as addresses, others as names.
            raise Unavailable(f"{shown(host)} is an unusual way to write an address; write it as 192.0.2.1")


class Resolver(AbstractResolver):
    """Resolves names, and refuses a name if any of its addresses is not allowed."""

    def __init__(self, guard: Guard, lookup: Lookup | None = None) -> None:
        self._guard = guard
        self._lookup = lookup or _getaddrinfo

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of ``host``; raise ``Unavailable`` if one of them is not allowed."""
        results: list[ResolveResult] = []
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        for found_family, _, proto, _, sockaddr in await self._lookup(host, port):
            address = ip_address(sockaddr[0])
            self._guard.check(address, host)
            results.append({
                "hostname": host, "host": str(address), "port": port,
                "family": found_family, "proto": proto, "flags": flags,
            })  # fmt: skip
        if not results:
            raise OSError(f"{host} has no address")
        return results

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def shown(host: str) -> str:
    """Return a host for a message, without control characters and cut to 80 characters."""
    text = "".join(character if character.isprintable() else "?" for character in host)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _wrapped(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that packets to this address end up at."""
    value = int(address)
    for network, shift in _WRAPPERS.items():
        if address in network:
            yield IPv4Address(value >> shift & 0xFFFFFFFF)
    if address in _TEREDO:
        yield IPv4Address(value >> 64 & 0xFFFFFFFF)
        yield IPv4Address(~value & 0xFFFFFFFF)


def _objection_to_ipv6(address: IPv6Address) -> str | None:
    if what := _find(address, _IPV6):
        return what
    if address not in _PUBLIC_IPV6:
        return "a reserved address"
    if address.scope_id is not None:
        return "an address of one network interface only"
    inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP and (what := _find(inner, _IPV4)):
        return f"which stands for {inner}, {what}"
    return None


def _find(address: Address, networks: dict[Any, str]) -> str | None:
    return next((what for network, what in networks.items() if address in network), None)


async def _getaddrinfo(host: str, port: int) -> Iterable[tuple[Any, ...]]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
