"""Who may ask at all: hosts, origins, loopback, proxies."""

from __future__ import annotations

from typing import Any

import pytest

from relaybox.web import dashboard
from tests.web.stage import OPERATOR, USERS, Stage, bearer, is_problem

FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:9999"},
    {"origin": "http://localhost:8811.evil.example"},
    {"origin": "http://[::1"},
    {"origin": ""},
    {"origin": "file://"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:8811", "sec-fetch-site": "cross-site"},
]


async def test_a_change_from_another_origin_is_refused(quick: Stage, subtests: pytest.Subtests) -> None:
    alone = dashboard(quick.outbox)
    for web in (quick.web, alone):
        for headers in FOREIGN:
            async with quick.client(web=web, headers=headers) as client:
                for path in ("/api/retry", "/api/destinations/mail/pause", "/login", "/actions/pause"):
                    with subtests.test(headers=headers, path=path):
                        is_problem(await client.post(path), 403)
    await alone.close()
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


NAMES = [
    ("outbox.example.org", 200),
    ("OUTBOX.example.org:443", 200),
    ("outbox.example.org.", 200),
    ("127.0.0.1:8811", 200),
    ("[::1]:8811", 200),
    ("localhost", 200),
    ("evil.example", 421),
    ("outbox.example.org.evil.example", 421),
    ("10.0.0.1", 421),
    ("", 400),
    ("a b", 400),
    ("[::1", 400),
    ("outbox.example.org:port", 400),
    ("outbox.example.org@evil.example", 400),
]


async def test_it_answers_to_its_names_alone(quick: Stage, subtests: pytest.Subtests) -> None:
    web = dashboard(quick.outbox, users=USERS, hosts=["outbox.example.org"])
    for name, status in NAMES:
        async with quick.client(web=web, headers={"host": name}) as client:
            with subtests.test(host=name):
                assert (await client.get("/api/relays")).status_code == status
                assert (await client.get("/nothing")).status_code == (404 if status == 200 else status)
    await web.close()


async def test_without_users_this_host_is_served(quick: Stage) -> None:
    web = dashboard(quick.outbox)
    for address in ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"):
        async with quick.client(token=None, web=web, address=(address, 1), host="127.0.0.1:8811") as client:
            assert (await client.get("/api/stats")).status_code == 200
            assert (await client.post("/api/destinations/mail/pause")).status_code == 200
    await web.close()
    assert {actor for actor, *_ in quick.operated.audit()} == {"local"}


ELSEWHERE: list[tuple[str | None, dict[str, str]]] = [
    ("10.0.0.1", {}),
    ("::ffff:10.0.0.1", {}),
    ("testclient", {}),
    (None, {}),
    ("127.0.0.1", {"host": "rebound.evil.example"}),
    ("127.0.0.1", {"host": "127.0.0.1.evil.example"}),
    ("127.0.0.1", {"x-forwarded-for": "10.0.0.1"}),
    ("127.0.0.1", {"forwarded": "for=10.0.0.1"}),
    ("127.0.0.1", {"x-real-ip": "10.0.0.1"}),
    ("127.0.0.1", {"x-forwarded-proto": "https"}),
    ("127.0.0.1", {"X-Forwarded-Anything": ""}),
    ("127.0.0.1", {"x_forwarded_for": "10.0.0.1"}),
    ("127.0.0.1", {"x-original-url": "/"}),
    ("127.0.0.1", {"x-original-forwarded-for": "10.0.0.1"}),
    ("127.0.0.1", {"cf-connecting-ip": "10.0.0.1"}),
    ("127.0.0.1", {"true-client-ip": "10.0.0.1"}),
    ("127.0.0.1", {"x-client-ip": "10.0.0.1"}),
    ("127.0.0.1", {"x-cluster-client-ip": "10.0.0.1"}),
    ("127.0.0.1", {"origin": "https://outbox.example.org"}),
    ("127.0.0.1", {"origin": "null"}),
    ("127.0.0.1", {"referer": "https://outbox.example.org/events"}),
    ("127.0.0.1", {"referer": "http://[::1"}),
]
PATHS = ("/", "/api/stats", "/livez", "/readyz", "/metrics", "/login", "/nothing", "/static/app.css")


async def test_without_users_nobody_else_is_served(quick: Stage, subtests: pytest.Subtests) -> None:
    web = dashboard(quick.outbox)
    for address, headers in ELSEWHERE:
        where = None if address is None else (address, 1)
        async with quick.client(token=None, web=web, address=where, headers=headers) as client:
            for path in PATHS:
                with subtests.test(address=address, headers=headers, path=path):
                    assert (await client.get(path)).status_code in (403, 421)
            assert (await client.post("/api/retry")).status_code in (403, 421)
    await web.close()


async def test_without_users_what_old_proxies_speak_is_not_understood(quick: Stage) -> None:
    web = dashboard(quick.outbox)
    for version, status in (("1.0", 403), ("1.1", 200), ("2", 200)):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http",
            "http_version": version,
            "method": "GET",
            "scheme": "http",
            "path": "/livez",
            "raw_path": b"/livez",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"referer", b"http://localhost:8811/")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8811),
        }
        await web(scope, receive, send)
        assert sent[0]["status"] == status
    await web.close()


async def test_credentials_do_not_help_where_there_are_no_users(quick: Stage) -> None:
    web = dashboard(quick.outbox)
    async with quick.client(web=web, address=("10.0.0.1", 1), headers=bearer(OPERATOR)) as client:
        is_problem(await client.get("/api/stats"), 403)
    await web.close()


async def test_forwarded_headers_are_not_believed(quick: Stage) -> None:
    headers = {"x-forwarded-for": "127.0.0.1", "x-forwarded-host": "localhost", "x-forwarded-proto": "https"}
    async with quick.client("wrong-wrong", address=("10.0.0.7", 1), headers=headers) as client:
        await client.get("/api/stats")
    assert "10.0.0.7" in str(quick.operated.audit())


OUTSIDE = [
    "/static/../app.py",
    "/static/..%2fapp.py",
    "/static/%2e%2e/app.py",
    "/static/..%5capp.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/app.css%00.py",
    "/static/",
    "/static",
    "/static/nothing.css",
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
