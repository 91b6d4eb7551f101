"""Who may ask at all: hosts, origins, proxies."""

from __future__ import annotations

from itertools import product

import pytest

from relaybox.web import dashboard
from tests.web.stage import USERS, Stage, is_problem

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
