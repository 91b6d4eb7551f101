"""An outbox that is served: rows in every state, users of both roles, and clients that ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import httpx2

from relaybox import Outbox
from relaybox.web import dashboard
from relaybox.web.app import Web
from tests.integration.operated import DESTINATIONS, Operated

OPERATOR = "token-of-the-operator"
VIEWER = "token-of-the-viewer"
USERS = {"ann": {"token": OPERATOR, "role": "operator"}, "victor": {"token": VIEWER, "role": "viewer"}}
HERE = ("127.0.0.1", 50_000)
NOBODY = UUID(int=7)
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class Stage:
    """A database, an operator with direct access to it, and the web in front of it."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.operated = Operated(url)
        self.outbox = Outbox(url, destinations=DESTINATIONS)
        self.web: Web = dashboard(self.outbox, **{"users": USERS, **settings})

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.web.close()
        await self.operated.close()

    def client(
        self,
        token: str | None = OPERATOR,
        *,
        web: Web | None = None,
        address: tuple[str, int] | None = HERE,
        host: str = "localhost:8811",
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.AsyncClient:
        given = {**({} if token is None else bearer(token)), **(headers or {})}
        transport = httpx2.ASGITransport(app=web or self.web, client=address)  # type: ignore[arg-type]
        return httpx2.AsyncClient(transport=transport, base_url=f"http://{host}", headers=given)

    async def get(self, path: str, **parameters: Any) -> Any:
        """Return the document there; anything but 200 is an error."""
        async with self.client() as client:
            answer = await client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, document: Any = None, status: int = 200) -> Any:
        async with self.client() as client:
            answer = await client.post(path, **({} if document is None else {"json": document}))
        assert answer.status_code == status, answer.text
        return answer.json()


def csrf_in(text: str) -> str:
    """Return the token of the forms of a page."""
    found = re.search(r'(?:name="csrf" value|name="relaybox-csrf" content)="([0-9a-f]+)"', text)
    assert found, text
    return found[1]


async def log_in(
    client: httpx2.AsyncClient, token: str = OPERATOR, after: str = "/events"
) -> httpx2.Response:
    page = await client.get("/login", headers=HTML)
    assert page.status_code == 200
    form = {"token": token, "next": after, "csrf": csrf_in(page.text)}
    headers = {**HTML, "origin": str(client.base_url).rstrip("/")}
    return await client.post("/login", data=form, headers=headers)


async def csrf_of(client: httpx2.AsyncClient) -> str:
    return csrf_in((await client.get("/destinations", headers=HTML)).text)


async def status_of(
    web: Web, path: str, receive: Any = None, sent: list[Any] | None = None, **scope: Any
) -> int:
    """Ask without a client, as a server would; the status of the answer."""
    sent = [] if sent is None else sent

    async def send(message: Any) -> None:
        sent.append(message)

    async def empty() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    whole = {"type": "http", "method": "GET", "scheme": "http", "root_path": "", "query_string": b""}
    whole |= {"path": path, "raw_path": path.encode(), "client": ("127.0.0.1", 1), **scope}
    await web(whole, receive or empty, send)
    return sent[0]["status"] if sent else 0


def is_problem(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the problem document of an answer."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert {"type", "title", "detail"} <= document.keys()
    return document
