"""Whether a destination takes the events of a backfill."""

from __future__ import annotations

import pytest

from relaybox import Destination
from relaybox.errors import ConfigError
from relaybox.event import Event
from relaybox.indexing.acceptance import check_target, rereads

URL = "meilisearch://127.0.0.1:7700/documents"


def newest(event: Event) -> dict[str, str]:
    return {"id": event.aggregate_id}


def test_a_search_destination_that_would_refuse_the_events_is_told() -> None:
    search = Destination("search", URL, options={"actions": {"document.seen": "ignore"}})

    check_target(search, "document.updated")
    with pytest.raises(ConfigError, match=r"^destination 'search': no action is known .*'document\.read'"):
        check_target(search, "document.read")
    with pytest.raises(ConfigError, match="it does ignore; choose another with event_type"):
        check_target(search, "document.seen")
    with pytest.raises(ConfigError, match="it does delete"):
        check_target(search, "document.deleted")


def test_any_other_destination_takes_what_it_gets() -> None:
    check_target(Destination("mail", "console:"), "document.read")
    assert not rereads(Destination("mail", "console:"))


def test_a_destination_says_whether_it_rereads() -> None:
    assert rereads(Destination("search", URL, options={"document": newest, "reread": True}))
    assert not rereads(Destination("search", URL))
