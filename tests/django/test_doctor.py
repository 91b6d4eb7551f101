"""``manage.py outbox doctor`` and ``manage.py outbox top``, on the project's settings."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from tests.django.conftest import ALIASES, Live

pytestmark = pytest.mark.parametrize("live", ALIASES, indirect=True)


def command(*arguments: str) -> str:
    stdout = StringIO()
    call_command("outbox", *arguments, stdout=stdout)
    return stdout.getvalue()


def test_nothing_is_said_of_tables_that_django_made(live: Live) -> None:
    document: dict[str, Any] = json.loads(
        command("--using", live.using, "doctor", "--json", "--skip", "sinks")
    )
    assert [one for one in document["findings"] if one["level"] != "info"] == []
    assert document["unseen"] == []


def test_a_missing_index_is_found_and_the_command_fails(live: Live) -> None:
    with connections[live.using].cursor() as cursor:
        cursor.execute("DROP INDEX idx_outbox_event_aggregate" + _on_table(live))
    out = StringIO()
    with pytest.raises(CommandError, match="status 1"):
        call_command("outbox", "--using", live.using, "doctor", "--only", "schema", stdout=out)
    assert "the index idx_outbox_event_aggregate is missing" in out.getvalue()


def _on_table(live: Live) -> str:
    return " ON outbox_event" if connections[live.using].vendor == "mysql" else ""


def test_top_prints_a_frame(live: Live) -> None:
    text = command("--using", live.using, "top", "--once")
    assert "relaybox top" in text
    assert "DESTINATION" in text
