"""What strangers get to see, and what it tells them of tokens."""

from __future__ import annotations

import hashlib
import hmac
import re

import pytest

from relaybox.errors import ConfigError
from relaybox.web import dashboard
from relaybox.web.csrf import COOKIE as FORM
from relaybox.web.session import derived
from relaybox.web.settings import WebSettings
from tests.web.stage import OPERATOR, USERS, VIEWER, Stage

HTML = {"accept": "text/html"}


def shown_in(text: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', text)
    assert found
    return found[1]


async def test_what_a_stranger_is_given_is_made_of_no_token(quick: Stage) -> None:
    again = dashboard(quick.outbox, users=USERS)
    seen = set()
    for web in (quick.web, quick.web, again):
        async with quick.client(token=None, web=web, headers=HTML) as client:
            page = await client.get("/login")
            seen.add(shown_in(page.text))
            cookie = page.headers["set-cookie"]
            assert f"{FORM}={shown_in(page.text)}" in cookie
            assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    await again.close()
    assert len(seen) == 3
    assert web.csrf.token("") not in seen


async def test_the_form_of_a_stranger_takes_the_cookie_that_came_with_it(quick: Stage) -> None:
    async with quick.client(token=None, headers=HTML) as client:
        token = shown_in((await client.get("/login")).text)
        form = {"token": OPERATOR, "csrf": token}
        client.cookies.clear()
        assert (await client.post("/login", data=form)).status_code == 403
        assert (await client.post("/login", data={**form, "csrf": ""})).status_code == 403
        for wrong in ("", "short", "0" * 64):
            headers = {"cookie": f"{FORM}={wrong}"}
            assert (await client.post("/login", data=form, headers=headers)).status_code == 403
        headers = {"cookie": f"{FORM}=short"}
        given = {"token": OPERATOR, "csrf": "short"}
        assert (await client.post("/login", data=given, headers=headers)).status_code == 403
        headers = {"cookie": f"{FORM}={token}"}
        assert (await client.post("/login", data=form, headers=headers)).status_code == 303


def test_a_key_is_not_made_of_tokens_by_one_plain_digest() -> None:
    key = derived("", "csrf", OPERATOR, VIEWER)
    text = "\0".join(("relaybox", "csrf", OPERATOR, VIEWER)).encode()
    assert key != hmac.digest(hashlib.sha256(b"").digest(), text, "sha256")
    whole = {
        derived(secret, purpose, *tokens, about=about)
        for secret in ("", "secret-of-the-web")
        for purpose in ("csrf", "cursor", "session")
        for tokens in ((), (OPERATOR,), (OPERATOR, VIEWER))
        for about in ("", "ann")
    }
    assert len(whole) == 2 * 3 * 3 * 2


def test_keys_are_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def scrypt(password: bytes, *, salt: bytes, n: int, r: int, p: int) -> bytes:
        asked.append(n * r * p)
        return b"stretched"

    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    derived("", "csrf", "a-token-of-nobody-else")
    assert asked == [2**17]


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="web: secret is too short; write 16 characters") as raised:
        WebSettings.of({"secret": "fifteen-letters"}).reveal()
    assert "fifteen" not in str(raised.value)
    assert WebSettings.of({"secret": "sixteen-letters!"}).reveal() == ()


async def test_a_cookie_is_secure_where_the_browser_speaks_tls(quick: Stage) -> None:
    for origin, secure in (("https://localhost:8811", True), ("http://localhost:8811", False)):
        async with quick.client(token=None, headers={**HTML, "origin": origin}) as client:
            token = shown_in((await client.get("/login")).text)
            headers = {"cookie": f"{FORM}={token}"}
            entered = await client.post("/login", data={"token": OPERATOR, "csrf": token}, headers=headers)
            assert entered.status_code == 303
            assert ("Secure" in entered.headers["set-cookie"].split("; ")) is secure
