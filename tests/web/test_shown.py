"""Texts that others wrote: whatever is secret in them is on no page, and in no answer."""

from __future__ import annotations

import pytest

from relaybox import Destination, Outbox
from relaybox.web import dashboard
from relaybox.web.show import place
from tests.web.stage import USERS, Stage

HTML = {"accept": "text/html"}
SAID = "401 Unauthorized: password=hush-hush of amqp://me:hush-hush@host; ticket: hush-hush"


async def test_errors_are_scrubbed_wherever_they_are_shown(quick: Stage) -> None:
    outbox, operated = quick.outbox, quick.operated
    web = dashboard(outbox, users=USERS, redact=["ticket"])
    failed = operated.emit("mail")
    operated.emit("web")
    await operated.fail("mail", SAID)
    await operated.store.open_circuit("web", 600.0, SAID)
    await operated.admin.note("test", {"password": "hush-hush", "ticket": "hush-hush", "reason": "why"})
    pages = ["/", "/destinations", "/destinations/mail", "/events", f"/events/{failed}", "/failures"]
    pages += ["/dead-letters", "/operations", "/audit", "/system"]
    documents = ["/api/stats", "/api/destinations", "/api/events", f"/api/events/{failed}", "/readyz"]
    documents += [f"/api/events/{failed}/why", "/api/failures", "/api/dead-letters", "/api/audit"]
    hidden = 0
    async with quick.client(web=web) as client:
        for path in pages + documents:
            answer = await client.get(path, headers=HTML if path in pages else {})
            assert answer.status_code in (200, 503), (path, answer.text)
            assert "hush-hush" not in answer.text, (path, answer.text)
            hidden += "•••" in answer.text or "\\u2022" in answer.text
    await web.close()
    assert hidden >= 10


@pytest.mark.parametrize(
    ("sink", "shown"),
    [
        ("https://me:hush@hooks.example:8443/services/T0/B0/hush?a=hush", "https://***@hooks.example:8443"),
        ("kafka://a:1,b:2/topic", "kafka://a:1,b:2"),
        ("console:", "console:"),
        ("handler:shop.tasks", "handler:shop.tasks"),
        ("https://hooks.example?hush", "https://hooks.example"),
    ],
)
def test_of_a_sink_its_scheme_and_its_host_are_shown(sink: str, shown: str) -> None:
    assert place(sink) == shown


async def test_the_path_of_a_sink_is_on_no_page(quick: Stage) -> None:
    url = quick.outbox.settings.database
    hook = Destination("hook", "https://hooks.example/services/hush-hush")
    web = dashboard(Outbox(url, destinations=[hook]), users=USERS)
    async with quick.client(web=web) as client:
        for path in ("/destinations", "/destinations/hook", "/api/destinations/hook", "/api/stats"):
            answer = await client.get(path, headers={} if "api" in path else HTML)
            assert "https://hooks.example" in answer.text
            assert "hush-hush" not in answer.text
    await web.close()
