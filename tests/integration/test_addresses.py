"""Where a webhook may not go, however it is written: refused, and no connection made."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import pytest

from relaybox.core.outcome import Delivered, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.sinks.http.address import Guard
from relaybox.sinks.http.sink import HttpSink
from relaybox.sinks.sink import Answer
from relaybox.testing.sink_contract import make_delivery
from tests.integration.receivers import Receiver, answer, answering, read_request

ADDRESSES = """
    0.0.0.0 0.0.0.1 0.255.255.255 10.0.0.0 10.0.0.5 10.255.255.255 100.64.0.0 100.64.0.1 100.100.100.200
    100.127.255.255 127.0.0.1 127.0.0.2 127.1.2.3 127.127.127.127 127.255.255.254 127.255.255.255
    168.63.129.16 169.254.0.1 169.254.169.254 169.254.170.2 169.254.255.255 172.16.0.1 172.17.0.1
    172.31.255.255 192.0.0.1 192.0.0.170 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 192.168.1.1
    192.168.255.255 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1
    250.1.2.3 255.255.255.254 255.255.255.255 [::] [::1] [0:0:0:0:0:0:0:1]
    [0000:0000:0000:0000:0000:0000:0000:0001] [::2] [::127.0.0.1] [::7f00:1] [::8.8.8.8]
    [::ffff:127.0.0.1] [::ffff:7f00:1] [::FFFF:127.0.0.1] [0:0:0:0:0:ffff:7f00:1] [::ffff:0.0.0.0]
    [::ffff:10.0.0.5] [::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [::ffff:192.168.1.1] [::ffff:100.64.0.1]
    [::ffff:0:127.0.0.1] [::ffff:0:a00:1] [64:ff9b::127.0.0.1] [64:ff9b::7f00:1] [64:ff9b::a9fe:a9fe]
    [64:ff9b::10.0.0.1] [64:ff9b:1::1] [64:ff9b:1::7f00:1] [64:ff9b:1:ffff::8.8.8.8] [2002:7f00:1::]
    [2002:7f00:1::1] [2002:a00:5::1] [2002:a9fe:a9fe::1] [2002:c0a8:101::] [2002:6440:1::1] [2001::1]
    [2001:0:7f00:1::] [2001:0:4136:e378:8000:63bf:80ff:fffe] [2001:0:808:808:0:0:5601:5601]
    [2001:0:a00:1:0:0:f7f7:f7f7] [2001:2::1] [2001:10::1] [2001:20::1] [2001:1ff:ffff::1] [2001:db8::1]
    [2001:db8:ffff::1] [3fff::1] [3fff:fff::1] [100::1] [100:0:0:1::1] [5f00::1] [4000::1] [8000::1]
    [c000::1] [1::] [fc00::1] [fd00::1] [fd00:ec2::254] [fd20:ce::254] [fdff:ffff::1] [fe00::1] [fe80::1]
    [fe80::a9fe:a9fe] [fe80::1%25lo] [fe80::1%25eth0] [fe80::1%lo] [febf::1] [fec0::1] [feff::1] [ff00::1]
    [ff02::1] [ff05::2] [ffff::1] [::1%25lo] [::1%251] [2606:4700::1%25eth0] [::ffff:127.0.0.1%251]
    [2606:4700::5efe:7f00:1] [2606:4700::200:5efe:a00:1] [0:0:0:0:0:0:127.0.0.1]
"""
# Addresses to some libraries, names to others.
ODD = """
    0 1 2130706433 017700000001 0x7f000001 0X7F000001 127.1 127.0.1 127.0.0.1. 127.1. 0177.0.0.1 0177.1
    0177.0.0.01 00127.0.0.1 127.0.0.001 127.000.000.001 0x7f.1 0x7f.0.0.1 0x7f.0x0.0x0.0x1 127.0x1
    127.0.0.0x1 0x7f.0.0.0x 3232235777 2852039166 0xa9fea9fe 025177524776 169.254.43518 169.16689662
    0xa9.0xfe.0xa9.0xfe 0251.0376.0251.0376 0250.0.0.1 10.1 10.0.5 167772165 012.0.0.5 0xa.0.0.5
    4294967295 4294967296 256.256.256.256 127.0.0.1.1 127.0.0.256 1.2.3 1.2.3.4.5 .127.0.0.1 127..0.1
    127.0.0.1.. 0.0 0x0 0x 00 08.8.8.8 999999999999 １２７.0.0.1 127.0.0.１ １２７。０。０。１
    127。0。0。1 127｡0｡0｡1 127．0．0．1 ①②⑦.⓪.⓪.① ⑯⑨.254.169.254 𝟏𝟐𝟕.0.0.1 𝟙𝟚𝟟.𝟘.𝟘.𝟙 ¹²⁷.0.0.1 ٣.0.0.1
    ०.0.0.1 %31%32%37.0.0.1 127%2e0%2e0%2e1 %30x7f.1 127.0.0.1%00 127.0.0.1%00.example.org 127.0.0.1%20
    127.0.0.1%0d%0a 0x7f%2e1 [127.0.0.1] [::1 ::1 [::1]] [[::1]] [0x7f.1] [::127.1] [::ffff:127.1]
    [::ffff:0x7f.1] [1] [] [:] [::g]
"""
# Whose host is not the one that a hasty reader sees.
TRICKS = """
    example.org@127.0.0.1 example.org:80@127.0.0.1 a@b@127.0.0.1 127.0.0.1@127.0.0.1 8.8.8.8@127.0.0.1
    example.org%2f@127.0.0.1 example.org%3f@127.0.0.1 example.org%23@127.0.0.1 example.org%40@127.0.0.1
    example.org\\@127.0.0.1 127.0.0.1\\@example.org 127.0.0.1\\.example.org example.org;@127.0.0.1
    %65xample.org@127.0.0.1 :@127.0.0.1 @127.0.0.1 ::1@127.0.0.1 [::1]@127.0.0.1 [::1]example.org
    example.org[::1] 127.0.0.1:1:2 127.0.0.1%3a80 127.0.0.1%5cexample.org 127.0.0.1%23.example.org
    example.org%2e%2e 127.0.0.1%2f.example.org 127.0.0.1,example.org 127.0.0.1;example.org 127.0.0.1&x=1
    *.example.org $(id).example.org exam%ple.org example%.org - -example.org . .. ... example..org
    .example.org {"127.0.0.1"} <127.0.0.1> `127.0.0.1` ^127.0.0.1 |127.0.0.1 127.0.0.1| "127.0.0.1"
    '127.0.0.1' 127.0.0.1' %00 %0a %20 %2e %2f %5b::1%5d lo%63alhost localhost%00 localhost%2e
    example.org%0d%0aHost:x xn--a xn--
"""
# All of these are names; the resolver of the tests answers each of them with a loopback address.
NAMES = """
    localhost LOCALHOST LocalHost localhost. localhost.. ip6-localhost ip6-loopback localhost.localdomain
    localhost6 broadcasthost kubernetes kubernetes.default.svc metadata metadata.google.internal
    instance-data.ec2.internal 127.0.0.1.nip.io 127-0-0-1.sslip.io localtest.me lvh.me vcap.me
    spoofed.example.org a.b.c.d 0x7f.one 127.0.0.one x0 one.0x7g ｌｏｃａｌｈｏｓｔ ⓛⓞⓒⓐⓛⓗⓞⓢⓣ ℓocalhost
    user@localhost a:b@localhost redis_1 host.docker.internal xn--bcher-kva.example bücher.example
"""
PUBLIC = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1
    169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.1 192.167.255.255 192.169.0.0
    198.17.255.255 198.20.0.0 223.255.255.255 2606:4700::1111 2a00:1450:4001::200e 2001:200::1
    2001:4860:4860::8888 2003::1 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1
    2001:0:808:808:0:0:f7f7:f7f7 2606:4700::5efe:808:808
"""
HOSTILE = [host for table in (ADDRESSES, ODD, TRICKS, NAMES) for host in table.split()]
HOSTILE += [f"127.0.0.1{end}" for end in (" ", "\t", "\r\nHost: x", "\0")]
HOSTILE += [f"{start}127.0.0.1" for start in (" ", "\n", "\x7f", "\u202e")]
HOSTILE += ["a" * 64 + ".example.org", "a." * 127 + "org", "lo\u00adcalhost", "lo\u200dcalhost", "ß\u0301."]


def found(port: int, *addresses: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


async def loopback(host: str, port: int) -> list[Any]:
    """Resolve every name to the loopback, as a resolver that an attacker controls."""
    return found(port, "127.0.0.1")


@pytest.fixture
async def canary() -> AsyncIterator[Receiver]:
    """Listens on every address of this machine, and answers every request."""
    receiver = Receiver()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.connections += 1
        await read_request(reader)
        writer.write(answer("200 OK"))
        writer.close()

    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    sock = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    server = await asyncio.start_server(serve, sock=sock)
    receiver.port = sock.getsockname()[1]
    yield receiver
    server.close()
    await server.wait_closed()


async def send(url: str, *, lookup: Any = loopback, allow: list[str] | None = None) -> Answer:
    sink = HttpSink(Destination("runner", url, allow=allow or [], timeout="30s"), lookup=lookup)
    try:
        [said] = await sink.send([make_delivery()])
    finally:
        await sink.close()
    return said


@pytest.mark.parametrize("host", HOSTILE)
async def test_a_hostile_url_is_refused_and_nobody_is_called(host: str, canary: Receiver) -> None:
    try:
        said = await send(f"http://{host}:{canary.port}/events")
    except ConfigError:
        said = None
    assert canary.connections == 0
    assert said is None or is_refusal(said), said


def is_refusal(said: Answer) -> bool:
    """True if our check refused it, rather than that it failed later."""
    refusals = ("to allow of destination 'runner'", "neither a name nor an address", "unusual way to write")
    return (
        isinstance(said, Unavailable)
        and not isinstance(said, Unreachable)
        and any(refusal in said.reason for refusal in refusals)
        and said.reason.isprintable()
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost", "shop.test"])
async def test_the_same_canary_is_called_where_that_is_allowed(host: str, canary: Receiver) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    said = await send(f"http://{host}:{canary.port}/events", allow=["127.0.0.0/8", "::1/128"])
    assert (said, canary.connections) == (Delivered(), 1)


async def test_the_refusal_names_the_line_to_write() -> None:
    said = await send("http://127.0.0.1/")
    fix = "add it to allow of destination 'runner' if events may go there"
    assert isinstance(said, Unavailable)
    assert said.reason == f"127.0.0.1 is a loopback address; {fix}"
    said = await send("http://user:secret@shop.test/?token=secret")
    assert isinstance(said, Unavailable)
    assert said.reason == f"shop.test resolves to 127.0.0.1, a loopback address; {fix}"


async def test_one_hostile_address_among_good_ones_is_enough(canary: Receiver) -> None:
    async def mixed(host: str, port: int) -> list[Any]:
        return found(port, "127.0.0.1", "10.0.0.5")

    said = await send(f"http://shop.test:{canary.port}/", lookup=mixed, allow=["127.0.0.0/8"])
    assert is_refusal(said)
    assert canary.connections == 0


async def test_the_address_that_was_checked_is_the_one_connected_to(canary: Receiver) -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[Any]:
        asked.append(host)
        return found(port, "127.0.0.1" if len(asked) == 1 else "169.254.169.254")

    url = f"http://shop.test:{canary.port}/"
    assert await send(url, lookup=rebinding, allow=["127.0.0.1/32"]) == Delivered()
    assert (asked, canary.connections) == (["shop.test"], 1)
    assert is_refusal(await send(url, lookup=rebinding, allow=["127.0.0.1/32"]))
    assert canary.connections == 1


async def test_a_name_stays_the_host_of_the_request() -> None:
    async with answering(answer("200 OK")) as receiver:
        await send(f"http://shop.test:{receiver.port}/", allow=["127.0.0.0/8"])
    assert receiver.requests[0].headers["host"] == f"shop.test:{receiver.port}"


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses_are_welcome(address: str) -> None:
    assert Guard("runner", []).objection(ip_address(address)) is None


@pytest.mark.parametrize(
    ("address", "allow", "welcome"),
    [
        ("10.0.0.5", "10.0.0.0/8", True),
        ("10.0.0.5", "10.0.0.5/32", True),
        ("10.0.0.6", "10.0.0.5/32", False),
        ("::ffff:10.0.0.5", "10.0.0.0/8", True),
        ("64:ff9b::a00:5", "10.0.0.0/8", True),
        ("::ffff:127.0.0.1", "10.0.0.0/8", False),
        ("fd00::1", "fd00::/8", True),
        ("fd00::1", "0.0.0.0/0", False),
        ("10.0.0.5", "::/0", False),
        ("::1", "::/0", True),
    ],
)
def test_an_allowed_network_is_welcome_and_no_other(address: str, allow: str, welcome: bool) -> None:
    assert (Guard("runner", [allow]).objection(ip_address(address)) is None) is welcome
