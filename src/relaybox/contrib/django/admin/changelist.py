"""The admin's list of deliveries and its filters: the operators' service reads a page, and never counts.

A page is named by the cursor it begins after, in place of Django's page number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.http import HttpRequest

from relaybox.contrib.django.models import OutboxEvent
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import EVERYTHING, Entry, Filter, Page

READ = frozenset(field.name for field in fields(Entry))
COLUMNS = [field.attname for field in OutboxEvent._meta.concrete_fields if field.attname in READ]

WINDOWS = 3
"""How many windows of rows one page looks through; the next page looks through the next ones."""

SPANS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}


class EventFilter(SimpleListFilter):  # type: ignore[misc]
    """A filter of the list: what ``narrow`` makes of it is asked of the service, not of a queryset."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return it as it is."""
        return queryset

    def narrowed(self, filter: Filter) -> Filter:
        """Return the filter with what was chosen here. Raise ``IncorrectLookupParameters``."""
        value = self.value()
        if value is None:
            return filter
        if value not in [str(choice) for choice, _ in self.lookup_choices]:
            raise IncorrectLookupParameters(f"{self.parameter_name} = {value!r}")
        return self.narrow(filter, value)

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter with one of the choices."""
        raise NotImplementedError


class StatusFilter(EventFilter):
    """By state."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return every state, and one for all that wait."""
        return (
            ("failed", "failed"),
            ("pending", "waiting (any of the next three)"),
            ("due", "due"),
            ("scheduled", "scheduled"),
            ("parked", "parked"),
            ("sending", "sending"),
            ("delivered", "delivered"),
            ("discarded", "discarded"),
        )

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter for this state."""
        return replace(filter, status=value)  # type: ignore[arg-type]


class DestinationFilter(EventFilter):
    """By destination."""

    title = "destination"
    parameter_name = "destination"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return the destinations that are configured, or have rows."""
        names = model_admin.ask(request, Admin.names)
        return [(name, name or "(no route takes them)") for name in names]

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter for this destination."""
        return replace(filter, destination=value)


class AgeFilter(EventFilter):
    """By the time they were emitted."""

    title = "time emitted"
    parameter_name = "emitted"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return a few spans."""
        return (
            ("1h", "in the last hour"),
            ("24h", "in the last 24 hours"),
            ("7d", "in the last 7 days"),
            ("30d", "in the last 30 days"),
        )

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter for events since then."""
        return replace(filter, since=datetime.now(UTC) - SPANS[value])


class EventList(ChangeList):  # type: ignore[misc]
    """One page of the list, and where the next one begins."""

    older: str | None = None
    newest: str | None = None

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return every row, for actions to pick theirs by primary key; the service applies the filters."""
        self.filter_specs, self.has_filters, unknown, _, self.has_active_filters = self.get_filters(request)
        if unknown:
            raise IncorrectLookupParameters(", ".join(unknown))
        self.clear_all_filters_qs = self.get_query_string(remove=self.get_filters_params())
        return self.root_queryset

    def get_results(self, request: HttpRequest) -> None:
        """Ask the service for the page."""
        cursor = _cursor(request.GET.get(PAGE_VAR))
        filter = EVERYTHING
        for spec in self.filter_specs:
            filter = spec.narrowed(filter)

        async def work(admin: Admin) -> Page:
            wanted = await searched(admin, filter, self.query)
            return await admin.events(wanted, limit=self.list_per_page, cursor=cursor, windows=WINDOWS)

        page = self.model_admin.ask(request, work)
        self.result_list = [row_of(entry, self.root_queryset.db) for entry in page.entries]
        self.result_count = self.full_result_count = len(page.entries)
        self.show_admin_actions = bool(page.entries)
        self.show_full_result_count = self.can_show_all = self.multi_page = False
        self.newest = None if cursor is None else self.get_query_string()
        self.older = None if page.cursor is None else self.get_query_string({PAGE_VAR: str(page.cursor)})

    @property
    def is_short(self) -> bool:
        """True if there is more to look through, though the page has room."""
        return self.older is not None and self.result_count < self.list_per_page


def row_of(entry: Entry, using: str) -> OutboxEvent:
    """Return the entry as a model; the payload and other columns it lacks are read on access."""
    row: OutboxEvent = OutboxEvent.from_db(using, COLUMNS, [getattr(entry, name) for name in COLUMNS])
    row.entry = entry
    return row


async def searched(admin: Admin, filter: Filter, query: str) -> Filter:
    """Return the filter with what was searched for: an id, ``order 17`` or ``order:17``, or an event type."""
    text = query.strip()
    if not text:
        return filter
    if (id_ := _uuid(text)) is not None:
        found = await admin.event(id_)
        return replace(filter, event_id=found[0].entry.event_id if found else id_)
    words = text.split(None, 1) if len(text.split(None, 1)) == 2 else text.split(":", 1)
    if len(words) == 2 and all(words):
        return replace(filter, aggregate_type=words[0], aggregate_id=words[1])
    return replace(filter, event_type=text)


def _cursor(value: str | None) -> UUID | None:
    if not value:
        return None
    if (cursor := _uuid(value)) is None:
        raise IncorrectLookupParameters(f"{PAGE_VAR} = {value!r}")
    return cursor


def _uuid(value: str) -> UUID | None:
    try:
        return UUID(value)
    except ValueError:
        return None
