"""Logging in: sessions, their cookies, tokens that change, who guesses, and what strangers get to see."""

from __future__ import annotations

import hashlib
import hmac
import logging
from datetime import UTC, datetime

import httpx2
import pytest

from relaybox.errors import ConfigError
from relaybox.web import dashboard
from relaybox.web.app import Web
from relaybox.web.auth import LIFE, Sessions, Users, derived
from relaybox.web.login import MOST, WINDOW, Attempts, Budget
from relaybox.web.problems import Problem
from relaybox.web.security import FORM_COOKIE as FORM
from relaybox.web.settings import Known, WebSettings
from tests.web.stage import HTML, OPERATOR, USERS, VIEWER, Stage, bearer, csrf_in, csrf_of, is_problem, log_in

COOKIE = "relaybox_session"


async def test_a_token_opens_a_session(stage: Stage) -> None:
    async with stage.client(token=None) as client:
        asked = await client.get("/events?status=failed", headers=HTML)
        assert asked.status_code == 303
        assert asked.headers["location"] == "/login?next=%2Fevents%3Fstatus%3Dfailed"
        entered = await log_in(client, after="/events?status=failed")
        assert (entered.status_code, entered.headers["location"]) == (303, "/events?status=failed")
        cookie = entered.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={LIFE}"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert OPERATOR not in cookie
        assert (await client.get("/events", headers=HTML)).status_code == 200
        assert (await client.get("/api/stats")).status_code == 200
    assert [(actor, action) for actor, action, *_ in stage.operated.audit()] == [("ann", "login")]


async def test_a_change_in_a_session_takes_its_token(quick: Stage) -> None:
    async with quick.client(token=None) as client:
        await log_in(client)
        for headers in ({}, {"x-csrf-token": b"0" * 64}, {"x-csrf-token": "é".encode("latin-1")}):
            problem = is_problem(await client.post("/api/retry", headers=headers), 403)
            assert "CSRF" in problem["detail"]
        token = await csrf_of(client)
        answer = await client.post("/api/retry", headers={"x-csrf-token": token})
        assert answer.json()["retried"] == 0
    async with quick.client(token=None) as other:
        await log_in(other)
        is_problem(await other.post("/api/retry", headers={"x-csrf-token": token}), 403)


async def test_a_form_without_its_token_is_refused(quick: Stage) -> None:
    async with quick.client(token=None) as client:
        is_problem(await client.post("/login", data={"token": OPERATOR}), 403)
        await log_in(client)
        is_problem(await client.post("/logout"), 403)
        for csrf in ({}, {"csrf": "wrong"}):
            form = {"destination": "mail", "reason": "x", **csrf}
            is_problem(await client.post("/actions/pause", data=form), 403)
    assert [action for _, action, *_ in quick.operated.audit()] == ["login"]


async def test_a_session_is_a_new_one_after_every_login(quick: Stage) -> None:
    async with quick.client(token=None) as client:
        client.cookies.set(COOKIE, "chosen-by-somebody-else", domain="localhost.local", path="/")
        await log_in(client)
        first = client.cookies.get(COOKIE, domain="localhost.local")
        client.cookies.clear()
        await log_in(client)
        second = client.cookies.get(COOKIE, domain="localhost.local")
    assert len({None, "chosen-by-somebody-else", first, second}) == 4


async def test_logging_out_ends_the_session_itself_even_after_a_restart(stage: Stage) -> None:
    async with stage.client(token=None) as client:
        await log_in(client)
        kept = client.cookies[COOKIE]
        assert (await client.get("/api/stats")).status_code == 200
        left = await client.post("/logout", data={"csrf": await csrf_of(client)})
        assert (left.status_code, left.headers["location"]) == (303, "/login")
        assert "Max-Age=0" in left.headers["set-cookie"]
    [_, (actor, action, details, _)] = stage.operated.audit()
    assert (actor, action) == ("ann", "logout")
    assert kept.partition(".")[0] not in str(details)
    async with dashboard(stage.outbox, users=USERS) as again:
        for web in (stage.web, again):
            async with stage.client(token=None, web=web, headers={"cookie": f"{COOKIE}={kept}"}) as client:
                is_problem(await client.get("/api/stats"), 401)
        async with stage.client(token=None, web=again) as client:
            await log_in(client)
            assert (await client.get("/api/stats")).status_code == 200


async def test_logging_out_ends_the_session_in_every_process(stage: Stage) -> None:
    async with dashboard(stage.outbox, users=USERS) as other, stage.client(token=None) as client:
        await log_in(client)
        kept = {"cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        async with (
            stage.client(token=None, web=other, headers=kept) as elsewhere,
            stage.client(token=None, web=other) as somebody,
        ):
            await log_in(somebody)
            for _ in range(2):
                assert (await elsewhere.get("/api/stats")).status_code == 200
            for _ in range(250):
                await stage.operated.admin.note("test", {})
            await client.post("/logout", data={"csrf": await csrf_of(client)})
            is_problem(await elsewhere.get("/api/stats"), 401)
            assert (await somebody.get("/api/stats")).status_code == 200


@pytest.mark.parametrize(
    "after", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", "/a\nb", ""]
)
async def test_a_login_leads_nowhere_else(quick: Stage, after: str) -> None:
    async with quick.client(token=None) as client:
        assert (await log_in(client, after=after)).headers["location"] == "/"


async def test_a_wrong_token_is_audited_and_not_shown(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with stage.client(token=None) as client:
            refused = await log_in(client, "a-token-that-is-wrong")
            assert refused.status_code == 401
            assert "set-cookie" not in refused.headers
            is_problem(await client.get("/api/stats", headers={"authorization": "Bearer x-token-wrong"}), 401)
    audit = stage.operated.audit()
    assert [(actor, action) for actor, action, *_ in audit] == [("unknown", "login refused")] * 2
    assert "127.0.0.1" in str(audit)
    assert "token-that-is-wrong" not in str(audit) + caplog.text + refused.text
    assert "token-wrong" not in str(audit) + caplog.text


async def test_a_client_that_guesses_passwords_is_locked_out(quick: Stage) -> None:
    async with quick.client(token=None) as client:
        for _ in range(MOST):
            assert (await log_in(client, "guess-guess")).status_code == 401
        limited = await log_in(client)
        assert limited.status_code == 429
        assert 0 < int(limited.headers["retry-after"]) <= WINDOW
        assert (await client.get("/api/stats", headers=bearer(OPERATOR))).status_code == 200
    async with quick.client(address=("127.0.0.2", 1)) as other:
        assert (await other.get("/api/stats")).status_code == 200


async def test_wrong_tokens_of_one_lock_nobody_else_out(quick: Stage) -> None:
    async with quick.client("wrong-wrong") as client:
        for _ in range(3 * MOST):
            for path in ("/livez", "/readyz", "/login"):
                assert (await client.get(path, headers=HTML)).status_code in (200, 503)
        assert not quick.operated.audit()
        for _ in range(MOST):
            is_problem(await client.get("/api/stats"), 401)
        limited = is_problem(await client.get("/api/stats"), 429)
        assert "Too many" in limited["detail"]
        assert (await client.get("/livez")).status_code == 200
    async with quick.client() as other:
        assert (await other.get("/api/stats")).status_code == 200
    async with quick.client(token=None) as somebody:
        assert (await log_in(somebody)).status_code == 303
    assert len(quick.operated.audit()) == MOST + 1


async def test_the_audit_of_refused_logins_is_bounded(quick: Stage) -> None:
    for number in range(60):
        async with quick.client("wrong-wrong", address=(f"10.0.0.{number}", 1)) as client:
            assert (await client.get("/api/stats")).status_code == 401
    assert len(quick.operated.audit()) == 20
    assert quick.web.gate.audited.left_out == 40


async def test_over_https_the_cookie_is_secure_and_under_a_prefix_it_stays_there(quick: Stage) -> None:
    transport = httpx2.ASGITransport(app=quick.web, client=("127.0.0.1", 1), root_path="/ops/outbox")
    async with httpx2.AsyncClient(transport=transport, base_url="https://shop.example/ops/outbox") as client:
        entered = await log_in(client)
    assert entered.headers["location"] == "/ops/outbox/events"
    assert {"Secure", "Path=/ops/outbox"} <= set(entered.headers["set-cookie"].split("; "))


async def test_over_https_an_answer_makes_browsers_stay_there(quick: Stage) -> None:
    for scheme in ("https", "http"):
        for path in ("/livez", "/login", "/api/stats", "/nothing"):
            async with quick.client(token=None) as client:
                answer = await client.get(f"{scheme}://localhost:8811{path}")
            assert ("strict-transport-security" in answer.headers) is (scheme == "https")


async def test_with_its_token_a_session_ends_and_with_two_both_are_good(quick: Stage) -> None:
    def served(tokens: str) -> Web:
        return dashboard(quick.outbox, users={"ann": {"token": tokens, "role": "operator"}})

    old, new = "old-token-of-ann-1", "new-token-of-ann-2"
    async with served(old) as before, served(f"{old} {new}") as both, served(new) as after:
        async with quick.client(token=None, web=before) as client:
            await log_in(client, old)
            cookie = {"cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        for web, status in ((both, 200), (after, 401)):
            async with quick.client(token=None, web=web, headers=cookie) as client:
                assert (await client.get("/api/openapi.json")).status_code == status
        async with quick.client(new, web=both) as client:
            assert (await client.get("/api/openapi.json")).status_code == 200


def test_a_cookie_that_was_changed_or_is_over_does_not_count() -> None:
    now = [1_000_000.0]
    ann = Known("ann", "viewer", ("token-1",))
    sessions = Sessions([ann], "", clock=lambda: now[0])
    cookie = sessions.issue("ann")
    found = sessions.read(cookie)
    assert found is not None
    assert found[0] == "ann"
    assert Sessions([ann], "another secret").read(cookie) is None
    assert Sessions([Known("ann", "viewer", ("token-2",))], "", clock=lambda: now[0]).read(cookie) is None
    text, _, signature = cookie.partition(".")
    wrong = ["", ".", text, f"{text}.", f"{text}A.{signature}", f".{signature}", "é.é", "\0", "a" * 9_999]
    assert [sessions.read(one) for one in wrong] == [None] * 9
    now[0] += LIFE
    assert sessions.read(cookie) is None
    now[0] -= 2 * LIFE
    assert sessions.read(cookie) is None


def test_attempts_are_forgotten_after_a_while_and_never_too_many() -> None:
    now = [0.0]
    attempts = Attempts(clock=lambda: now[0])
    for _ in range(MOST):
        attempts.check("a")
        attempts.failed("a")
    with pytest.raises(Problem, match="Too many"):
        attempts.check("a")
    attempts.check("b")
    now[0] += WINDOW + 1
    attempts.check("a")
    for number in range(20_000):
        attempts.failed(str(number))
    assert len(attempts._failed) == 10_000


def test_a_budget_says_what_it_left_out() -> None:
    now = [0.0]
    budget = Budget(2, clock=lambda: now[0])
    assert [budget.take() for _ in range(5)] == [0, 0, None, None, None]
    now[0] += WINDOW
    assert [budget.take(), budget.take()] == [3, 0]


def test_what_holds_tokens_does_not_show_them(quick: Stage) -> None:
    web = quick.web
    shown = repr([web, web.__dict__, web.settings, web.gate.__dict__, web.gate.users, quick.outbox.settings])
    assert OPERATOR not in shown
    assert VIEWER not in shown


async def test_what_a_stranger_is_given_is_made_of_no_token(quick: Stage) -> None:
    again = dashboard(quick.outbox, users=USERS)
    seen = set()
    for web in (quick.web, quick.web, again):
        async with quick.client(token=None, web=web, headers=HTML) as client:
            page = await client.get("/login")
            seen.add(csrf_in(page.text))
            cookie = page.headers["set-cookie"]
            assert f"{FORM}={csrf_in(page.text)}" in cookie
            assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    await again.close()
    assert len(seen) == 3
    assert web.csrf.token("") not in seen


async def test_the_form_of_a_stranger_takes_the_cookie_that_came_with_it(quick: Stage) -> None:
    async with quick.client(token=None, headers=HTML) as client:
        token = csrf_in((await client.get("/login")).text)
        form = {"token": OPERATOR, "csrf": token}
        client.cookies.clear()
        assert (await client.post("/login", data=form)).status_code == 403
        assert (await client.post("/login", data={**form, "csrf": ""})).status_code == 403
        pairs = [*((token, wrong) for wrong in ("", "short", "0" * 64)), ("short", "short"), (token, token)]
        for csrf, cookie in pairs:
            form, headers = {"token": OPERATOR, "csrf": csrf}, {"cookie": f"{FORM}={cookie}"}
            status = 303 if csrf == cookie == token else 403
            assert (await client.post("/login", data=form, headers=headers)).status_code == status


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


HASHED = "sha256:" + hashlib.sha256(OPERATOR.encode()).hexdigest()


@pytest.mark.parametrize("until", ["", ":9999-12-30"])
async def test_the_settings_may_hold_the_hash_of_a_token_which_opens_nothing(
    until: str, quick: Stage
) -> None:
    users = {"ann": {"token": f"{HASHED}{until}", "role": "operator"}}
    web = dashboard(quick.outbox, users=users, secret="s" * 32)
    for token, status in ((OPERATOR, 200), (f"{HASHED}{until}", 401), (HASHED.partition(":")[2], 401)):
        async with quick.client(token, web=web) as client:
            assert (await client.get("/api/stats")).status_code == status
    async with quick.client(None, web=web) as client:
        assert (await log_in(client)).status_code == 303
        assert (await client.get("/events", headers=HTML)).status_code == 200
    # Another secret, other sessions: the hash alone signs nothing.
    known = WebSettings.of({"users": users, "secret": "s" * 32}).reveal()
    cookie = Sessions(known, "s" * 32).issue("ann")
    assert Sessions(known, "s" * 32).read(cookie)
    assert Sessions(known, "").read(cookie) is None


async def test_a_token_ends_after_its_last_day_and_its_sessions_with_it(quick: Stage) -> None:
    expired = {"ann": {"token": f"{HASHED}:2020-01-31", "role": "operator"}}
    web = dashboard(quick.outbox, users=expired, secret="s" * 32)
    async with quick.client(OPERATOR, web=web) as client:
        assert (await client.get("/api/stats")).status_code == 401
    async with quick.client(None, web=web) as client:
        assert (await log_in(client)).status_code == 401
        assert (await client.get("/api/stats")).status_code == 401, "without a valid user nothing is open"
    end = datetime(2020, 2, 1, tzinfo=UTC).timestamp()
    now = [end - 10]
    known = WebSettings.of({"users": expired, "secret": "s" * 32}).reveal()
    users, sessions = Users(known, lambda: now[0]), Sessions(known, "s" * 32, lambda: now[0])
    cookie = sessions.issue("ann")
    assert users.by_token(OPERATOR)
    assert sessions.read(cookie)
    now[0] = end
    assert users.by_token(OPERATOR) is None
    assert sessions.read(cookie) is None


@pytest.mark.parametrize(
    "token",
    ["sha256:short-or-not-hex", f"{HASHED}:", f"{HASHED}:2027-02-30", HASHED.upper().replace("SHA", "sha")],
)
def test_a_malformed_hash_is_refused_and_one_needs_a_secret_to_sign_with(token: str) -> None:
    with pytest.raises(ConfigError, match="user 'ann': token holds a malformed hash; write sha256: and 64"):
        WebSettings.of({"users": {"ann": {"token": token}}, "secret": "s" * 32}).reveal()
    with pytest.raises(ConfigError, match="also write secret"):
        WebSettings.of({"users": {"ann": {"token": HASHED}}}).reveal()
    both = {"ann": {"token": HASHED}, "eve": {"token": OPERATOR}}
    with pytest.raises(ConfigError, match="have the same token"):
        WebSettings.of({"users": both, "secret": "s" * 32}).reveal()


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
            token = csrf_in((await client.get("/login")).text)
            headers = {"cookie": f"{FORM}={token}"}
            entered = await client.post("/login", data={"token": OPERATOR, "csrf": token}, headers=headers)
            assert entered.status_code == 303
            assert ("Secure" in entered.headers["set-cookie"].split("; ")) is secure
