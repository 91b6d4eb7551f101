"""The admin's list of deliveries. Rows are never counted, so a cursor replaces Django's page number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters, admin_urlname
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from relaybox.contrib.django.admin.columns import scrubbed
from relaybox.contrib.django.emit import after_commit
from relaybox.contrib.django.models import OutboxEvent
from relaybox.core.text import plural
from relaybox.core.values import parsed
from relaybox.operate.admin import Admin, Done, Named
from relaybox.operate.documents import PAST
from relaybox.stores.ledger import EVERYTHING, Entry, Filter, Page

READ = frozenset(field.name for field in fields(Entry))
COLUMNS = [field.attname for field in OutboxEvent._meta.concrete_fields if field.attname in READ]

WINDOWS = 3
"""How many windows of rows one page searches. The next page continues after them."""

SPANS = {
    "1h": (timedelta(hours=1), "in the last hour"),
    "24h": (timedelta(hours=24), "in the last 24 hours"),
    "7d": (timedelta(days=7), "in the last 7 days"),
    "30d": (timedelta(days=30), "in the last 30 days"),
}

WAITING = "pending (due, scheduled or parked)"
CONFIRMED = "confirmed"
FROM_DETAIL = "from_detail"


class EventFilter(SimpleListFilter):  # type: ignore[misc]
    """A list filter that sets a field of the admin service's ``Filter`` and leaves the queryset alone."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the queryset unchanged."""
        return queryset

    def narrowed(self, filter: Filter) -> Filter:
        """Return the filter with the chosen value. Raise ``IncorrectLookupParameters``."""
        value = self.value()
        if value is None:
            return filter
        if value not in [str(choice) for choice, _ in self.lookup_choices]:
            raise IncorrectLookupParameters(f"{self.parameter_name} = {value!r}")
        return self.narrow(filter, value)

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter with this choice."""
        return replace(filter, **{self.parameter_name: value})  # type: ignore[arg-type]


class StatusFilter(EventFilter):
    """Filter by state."""

    title = parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return every state, and ``pending`` for all that wait."""
        states = ("failed", "pending", "due", "scheduled", "parked", "sending", "delivered", "discarded")
        return [(state, WAITING if state == "pending" else state) for state in states]


class DestinationFilter(EventFilter):
    """Filter by destination."""

    title = parameter_name = "destination"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return the destinations that are configured or have rows."""
        return [(name, name or "(no route)") for name in model_admin.ask(request, Admin.names)]


class AgeFilter(EventFilter):
    """Filter by the time the event was emitted."""

    title = "time emitted"
    parameter_name = "emitted"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Return the time spans."""
        return [(name, text) for name, (_, text) in SPANS.items()]

    def narrow(self, filter: Filter, value: str) -> Filter:
        """Return the filter for events in the span."""
        return replace(filter, since=datetime.now(UTC) - SPANS[value][0])


class EventList(ChangeList):  # type: ignore[misc]
    """One page of the list, and the links to the next and the newest page."""

    older: str | None = None
    newest: str | None = None
    show_full_result_count = can_show_all = multi_page = False

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return all rows, from which actions select by primary key; the service applies the filters."""
        self.filter_specs, self.has_filters, unknown, _, self.has_active_filters = self.get_filters(request)
        if unknown:
            raise IncorrectLookupParameters(", ".join(unknown))
        self.clear_all_filters_qs = self.get_query_string(remove=self.get_filters_params())
        return self.root_queryset

    def get_results(self, request: HttpRequest) -> None:
        """Ask the service for the page."""
        value = request.GET.get(PAGE_VAR)
        cursor = parsed(UUID, value) if value else None
        if value and cursor is None:
            raise IncorrectLookupParameters(f"{PAGE_VAR} = {value!r}")
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
        self.newest = None if cursor is None else self.get_query_string()
        self.older = None if page.cursor is None else self.get_query_string({PAGE_VAR: str(page.cursor)})

    @property
    def is_short(self) -> bool:
        """True if the page has room but more rows are left to search."""
        return self.older is not None and self.result_count < self.list_per_page


def row_of(entry: Entry, using: str) -> OutboxEvent:
    """Return the entry as a model without secrets in its error; other columns are read on access."""
    entry = replace(entry, error_message=scrubbed(entry.error_message))
    row: OutboxEvent = OutboxEvent.from_db(using, COLUMNS, [getattr(entry, name) for name in COLUMNS])
    row.entry = entry
    return row


async def searched(admin: Admin, filter: Filter, query: str) -> Filter:
    """Return the filter with the search: an id, ``order 17`` or ``order:17``, or an event type."""
    text = query.strip()
    if not text:
        return filter
    if (id_ := parsed(UUID, text)) is not None:
        found = await admin.event(id_)
        return replace(filter, event_id=found[0].entry.event_id if found else id_)
    words = text.split(None, 1)
    words = words if len(words) == 2 else text.split(":", 1)
    if len(words) == 2 and all(words):
        return replace(filter, aggregate_type=words[0], aggregate_id=words[1])
    return replace(filter, event_type=text)


Name: TypeAlias = Literal["retry", "replay", "discard"]


@dataclass(frozen=True, slots=True)
class Action:
    """An action of the admin service, and its texts on pages."""

    name: Name
    effect: str
    condition: str

    @property
    def title(self) -> str:
        """Return the text of the button."""
        return self.name.capitalize()

    @property
    def done(self) -> str:
        """Return the past tense, as the beginning of a sentence."""
        return PAST[self.name].capitalize()

    async def ask(self, admin: Admin, ids: Sequence[UUID], *, dry_run: bool) -> Done:
        """Act on these deliveries only, not on the other deliveries of their events."""
        verb = {"retry": admin.retry, "replay": admin.replay, "discard": admin.discard}[self.name]
        return await verb(Named(ids, exact=True), dry_run=dry_run)


RETRY = Action(
    "retry",
    "They are tried again from the first attempt, in their original order.",
    "Only deliveries that failed or wait for another attempt can be retried.",
)
REPLAY = Action(
    "replay",
    "Each is sent again as a new delivery of the same event, with a header that marks it as a replay.",
    "Only deliveries that are delivered, failed or discarded can be replayed, to a destination that exists.",
)
DISCARD = Action(
    "discard",
    "They are not sent. Deliveries that wait behind them continue. A discarded delivery can be replayed.",
    "Deliveries that are being sent, delivered or discarded cannot be discarded.",
)
ACTIONS = {action.name: action for action in (RETRY, REPLAY, DISCARD)}


def run(action: Action, model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse:
    """Ask for confirmation, or act on the selected deliveries if confirmed."""
    # Filter again: for "select across", Django passes a queryset of all rows.
    rows = list(
        queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)).defer("payload", "headers")
    )
    for row in rows:
        row.error_message = scrubbed(row.error_message)
    confirmed = CONFIRMED in request.POST

    async def work(admin: Admin) -> Done:
        return await action.ask(admin, [row.pk for row in rows], dry_run=not confirmed)

    done = model_admin.ask(request, work)
    left = {*done.idle, *done.unknown}
    taken = [row for row in rows if row.pk not in left]
    if taken and not confirmed:
        return _confirmation(action, model_admin, request, taken, [row for row in rows if row.pk in left])
    _say(action, model_admin, request, taken, len(done.idle))
    if taken:
        # Notify, so that a relay looks now and not only at the next sweep.
        connection = connections[model_admin.get_using(request)]
        after_commit(connection, [(row.destination, str(row.pk)) for row in taken])
        for row in taken:
            model_admin.log_change(request, row, f"{action.done} in the admin.")
    return HttpResponseRedirect(_address(model_admin, request))


def _confirmation(
    action: Action, model_admin: Any, request: HttpRequest, taken: list[OutboxEvent], left: list[OutboxEvent]
) -> HttpResponse:
    opts = model_admin.opts
    context = {
        **model_admin.admin_site.each_context(request),
        "title": f"{action.title} {plural(len(taken), 'delivery')}?",
        "opts": opts,
        "media": model_admin.media,
        "action": action,
        "counted": _counted(taken),
        "taken": taken,
        "left": left,
        "checkbox": ACTION_CHECKBOX_NAME,
        "confirmed": CONFIRMED,
        "from_detail": FROM_DETAIL if FROM_DETAIL in request.POST else None,
        "preserved_filters": request.POST.get(FROM_DETAIL, ""),
        "back": _address(model_admin, request),
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, f"admin/{opts.app_label}/{opts.model_name}/confirm.html", context)


def _say(action: Action, model_admin: Any, request: HttpRequest, taken: list[OutboxEvent], left: int) -> None:
    if taken:
        model_admin.message_user(request, f"{action.done} {_counted(taken)}.", messages.SUCCESS)
    if left:
        text = f"Not changed: {plural(left, 'delivery')}. {action.condition}"
        model_admin.message_user(request, text, messages.WARNING)
    elif not taken:
        text = "Nothing was done: the selected deliveries no longer exist."
        model_admin.message_user(request, text, messages.WARNING)


def _address(model_admin: Any, request: HttpRequest) -> str:
    if FROM_DETAIL not in request.POST:
        return str(request.get_full_path())
    opts = model_admin.opts
    id_ = request.POST.get(ACTION_CHECKBOX_NAME)
    url = reverse(admin_urlname(opts, "change"), args=[id_], current_app=model_admin.admin_site.name)
    return str(add_preserved_filters({"preserved_filters": request.POST.get(FROM_DETAIL), "opts": opts}, url))


def _counted(rows: Iterable[OutboxEvent]) -> str:
    """Return the counts by destination, such as ``2 to billing, 1 to search``."""
    numbers = Counter(row.destination for row in rows)
    return ", ".join(f"{number} to {name or '(none)'}" for name, number in sorted(numbers.items()))
