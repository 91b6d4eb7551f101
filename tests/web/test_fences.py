"""Who may ask at all: hosts, origins, loopback, proxies."""

from __future__ import annotations

from itertools import product

import pytest

from relaybox.web import dashboard
from tests.web.stage import USERS, Stage, is_problem, status_of

HERE = "http://localhost:8811"
FOREIGN = [
    *({"origin": origin} for origin in ("https://evil.example", "null", "http://localhost:9999", "")),
    *({"origin": origin} for origin in (f"{HERE}.evil.example", "http://[::1", "file://")),
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    {"origin": HERE, "sec-fetch-site": "cross-site"},
]


async def test_a_change_from_another_origin_is_refused(quick: Stage, subtests: pytest.Subtests) -> None:
    async with dashboard(quick.outbox) as alone:
        for web, headers in product((quick.web, alone), FOREIGN):
            async with quick.client(web=web, headers=headers) as client:
                for path in ("/api/retry", "/api/destinations/mail/pause", "/login", "/actions/pause"):
                    with subtests.test(headers=headers, path=path):
                        is_problem(await client.post(path), 403)
    assert not quick.operated.audit()


OWN = [
    ("localhost:8811", "http://localhost:8811"),
    ("outbox.example.org", "https://outbox.example.org"),
    ("outbox.example.org", "https://OUTBOX.example.org:443"),
    ("[::1]:8811", "http://[::1]:8811"),
]


async def test_a_change_from_here_is_fine(quick: Stage, subtests: pytest.Subtests) -> None:
    for host, origin in OWN:
        headers = {"origin": origin, "sec-fetch-site": "same-origin"}
        async with quick.client(host=host, headers=headers) as client:
            with subtests.test(host=host, origin=origin):
                assert (await client.post("/api/retry")).status_code == 200


NAMES = {
    200: [
        *("outbox.example.org", "OUTBOX.example.org:443", "outbox.example.org.", "127.0.0.1:8811"),
        *("[::1]:8811", "localhost"),
    ],
    421: ["evil.example", "outbox.example.org.evil.example", "10.0.0.1"],
    400: ["", "a b", "[::1", "outbox.example.org:port", "outbox.example.org@evil.example"],
}


async def test_it_answers_to_its_names_alone(quick: Stage, subtests: pytest.Subtests) -> None:
    async with dashboard(quick.outbox, users=USERS, hosts=["outbox.example.org"]) as web:
        for status, name in [(status, name) for status, names in NAMES.items() for name in names]:
            async with quick.client(web=web, headers={"host": name}) as client:
                with subtests.test(host=name):
                    assert (await client.get("/api/relays")).status_code == status
                    assert (await client.get("/nothing")).status_code == (404 if status == 200 else status)


async def test_without_users_this_host_is_served(quick: Stage) -> None:
    async with dashboard(quick.outbox) as web:
        for address in ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"):
            async with quick.client(
                token=None, web=web, address=(address, 1), host="127.0.0.1:8811"
            ) as client:
                assert (await client.get("/api/stats")).status_code == 200
                assert (await client.post("/api/destinations/mail/pause")).status_code == 200
    assert {actor for actor, *_ in quick.operated.audit()} == {"local"}


LOOPBACK = "127.0.0.1"
FORWARDED: list[dict[str, str]] = [
    {"host": "rebound.evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"forwarded": "for=10.0.0.1"},
    {"x-forwarded-proto": "https"},
    {"X-Forwarded-Anything": ""},
    {"x-original-url": "/"},
    *({name: "10.0.0.1"} for name in ("x-forwarded-for", "x-real-ip", "x_forwarded_for", "cf-connecting-ip")),
    *({f"{name}-client-ip": "10.0.0.1"} for name in ("true", "x-cluster")),
    *({name: "10.0.0.1"} for name in ("x-original-forwarded-for", "x-client-ip")),
    {"origin": "https://outbox.example.org"},
    {"origin": "null"},
    {"referer": "https://outbox.example.org/events"},
    {"referer": "http://[::1"},
]
ELSEWHERE: list[tuple[str | None, dict[str, str]]] = [
    *((address, {}) for address in ("10.0.0.1", "::ffff:10.0.0.1", "testclient", None)),
    *((LOOPBACK, headers) for headers in FORWARDED),
]
PATHS = ("/", "/api/stats", "/livez", "/readyz", "/metrics", "/login", "/nothing", "/static/app.css")


async def test_without_users_nobody_else_is_served(quick: Stage, subtests: pytest.Subtests) -> None:
    async with dashboard(quick.outbox) as web:
        for address, headers in ELSEWHERE:
            where = None if address is None else (address, 1)
            async with quick.client(token=None, web=web, address=where, headers=headers) as client:
                for path in PATHS:
                    with subtests.test(address=address, headers=headers, path=path):
                        assert (await client.get(path)).status_code in (403, 421)
                assert (await client.post("/api/retry")).status_code in (403, 421)


async def test_without_users_what_old_proxies_speak_is_not_understood(quick: Stage) -> None:
    headers = [(b"host", b"localhost"), (b"referer", b"http://localhost:8811/")]
    async with dashboard(quick.outbox) as web:
        for version, status in (("1.0", 403), ("1.1", 200), ("2", 200)):
            assert await status_of(web, "/livez", http_version=version, headers=headers) == status


async def test_credentials_do_not_help_where_there_are_no_users(quick: Stage) -> None:
    async with dashboard(quick.outbox) as web, quick.client(web=web, address=("10.0.0.1", 1)) as client:
        is_problem(await client.get("/api/stats"), 403)


async def test_forwarded_headers_are_not_believed(quick: Stage) -> None:
    headers = {"x-forwarded-for": "127.0.0.1", "x-forwarded-host": "localhost", "x-forwarded-proto": "https"}
    async with quick.client("wrong-wrong", address=("10.0.0.7", 1), headers=headers) as client:
        await client.get("/api/stats")
    assert "10.0.0.7" in str(quick.operated.audit())


OUTSIDE = [
    *("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/..%5capp.py"),
    *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/app.css%00.py"),
    *("/static/", "/static", "/static/nothing.css"),
]


async def test_static_files_are_its_own_alone(quick: Stage, subtests: pytest.Subtests) -> None:
    async with quick.client() as client:
        for path in OUTSIDE:
            with subtests.test(path=path):
                request = client.build_request("GET", "http://localhost/")
                request.url = request.url.copy_with(raw_path=path.encode())
                answer = await client.send(request)
                assert answer.status_code == 404, answer.text
                assert "import" not in answer.text
                assert "root:" not in answer.text
