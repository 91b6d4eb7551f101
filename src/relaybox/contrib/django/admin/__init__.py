"""The outbox in Django's admin: deliveries, why they are in their state, and three actions.

The permission ``view`` shows deliveries; ``retry``, ``replay`` and ``discard`` each allow that action.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partialmethod
from typing import Any, ClassVar, TypeAlias, TypeVar
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.templatetags.admin_urls import admin_urlname
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse
from django.urls import reverse

from relaybox.contrib.django.admin.changelist import (
    ACTIONS,
    FROM_DETAIL,
    Action,
    AgeFilter,
    DestinationFilter,
    EventList,
    Name,
    StatusFilter,
    row_of,
    run,
)
from relaybox.contrib.django.admin.columns import (
    COLUMNS,
    age,
    badge,
    document,
    facts_of_delivery,
    facts_of_event,
    moment,
    payload,
    scrubbed,
    sentence,
)
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.outbox import ask
from relaybox.contrib.django.private import redirect_from_missing
from relaybox.core.values import parsed
from relaybox.operate.admin import Admin, Detail
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Entry, Filter

T = TypeVar("T")
Detailed: TypeAlias = tuple[Detail, Reason, list[Name], list[Entry]]
"""A delivery, the reason for its state, the possible actions, and the event's other deliveries."""

ACTOR = 200
"""The longest actor that the audit accepts."""

SIBLINGS = 50
"""Other deliveries of the event that a page lists."""


def _action(action: Action) -> Callable[..., HttpResponse]:

    def method(self: OutboxEventAdmin, request: HttpRequest, queryset: Any) -> HttpResponse:
        return run(action, self, request, queryset)

    described = admin.action(description=f"{action.title} selected deliveries", permissions=[action.name])
    return described(method)  # type: ignore[no-any-return]


@admin.register(OutboxEvent)
class OutboxEventAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """A read-only admin of the deliveries in the database ``using``, or in the one that routers choose."""

    using: str | None = None

    class Media:
        css: ClassVar = {"all": ("relaybox/admin.css",)}

    list_display = (
        *("state", "event_type", "aggregate", "destination"),
        *("attempts_made", "age", "next_attempt", "error"),
    )
    state, aggregate, attempts_made, age, next_attempt, error = map(staticmethod, COLUMNS)
    list_display_links = ("event_type",)
    list_filter = (StatusFilter, DestinationFilter, AgeFilter)
    list_per_page = 50
    sortable_by = ()
    search_fields = ("aggregate_type", "aggregate_id", "event_id", "event_type")
    search_help_text = "An aggregate, such as order 17 or order:17; an event’s ID; or an event type."
    actions = ("retry", "replay", "discard")
    show_full_result_count = False
    # Counting is slow on large tables. Django 4.2 has no facets.
    show_facets = getattr(getattr(admin, "ShowFacets", None), "NEVER", None)

    def get_using(self, request: HttpRequest) -> str:
        """Return the alias of the database to show."""
        return self.using or str(router.db_for_write(self.model))

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the rows of that database."""
        return super().get_queryset(request).using(self.get_using(request))

    def ask(self, request: HttpRequest, work: Callable[[Admin], Awaitable[T]]) -> T:
        """Run the work with the admin service, with the user as the actor."""
        return ask(self.get_using(request), request.user.get_username()[:ACTOR], work)

    def may(self, request: HttpRequest, what: str) -> bool:
        """True if the user has this permission for the model."""
        name = f"{self.opts.app_label}.{get_permission_codename(what, self.opts)}"
        return bool(request.user.has_perm(name))

    def never(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: only relays, actions and retention change or remove rows."""
        return False

    has_add_permission = has_change_permission = has_delete_permission = never
    retry, replay, discard = map(_action, ACTIONS.values())
    has_retry_permission = partialmethod(may, what="retry")
    has_replay_permission = partialmethod(may, what="replay")
    has_discard_permission = partialmethod(may, what="discard")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[EventList]:
        """Return the list that reads through the admin service."""
        return EventList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list, and run actions on it."""
        context = {"title": str(self.opts.verbose_name_plural).capitalize(), **(extra_context or {})}
        return super().changelist_view(request, context)

    def response_action(self, request: HttpRequest, queryset: Any, **kwargs: Any) -> HttpResponse | None:
        """Run the action, and report malformed ids. Django 6.1 adds ``kwargs`` about the page."""
        try:
            return super().response_action(request, queryset, **kwargs)
        except ValidationError as error:
            self.message_user(request, " ".join(error.messages), messages.ERROR)
            return None

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show one delivery."""
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        id_ = parsed(UUID, unquote(object_id))
        detailed = None if id_ is None else self.ask(request, lambda admin: look(admin, id_))
        if detailed is None:
            return redirect_from_missing(self, request, object_id)
        context = {**self._context(request, detailed), **(extra_context or {})}
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/relaybox/outboxevent/change_form.html", context)

    def _context(self, request: HttpRequest, detailed: Detailed) -> dict[str, Any]:
        own, reason, offered, siblings = detailed
        entry, content = own.entry, own.content
        assert content is not None
        using = self.get_using(request)
        row, *rows = [row_of(one, using) for one in (entry, *siblings)]
        listing = str(reverse(admin_urlname(self.opts, "changelist"), current_app=self.admin_site.name))
        return {
            **self.admin_site.each_context(request),
            "title": str(row),
            "opts": self.opts,
            "media": self.media,
            "original": row,
            "preserved_filters": self.get_preserved_filters(request),
            "state": badge(entry.state),
            "why": sentence(reason),
            "offered": [ACTIONS[name] for name in offered if self.may(request, name)],
            "from_detail": FROM_DETAIL,
            "sections": [
                ("Event", list(facts_of_event(entry, listing))),
                ("Delivery", list(facts_of_delivery(entry, listing))),
            ],
            "payload": payload(content),
            "headers": document(content.headers),
            "attempts": [
                (a.attempt, moment(a.failed_at, entry.seen_at), a.relay, scrubbed(a.error_message))
                for a in own.attempts
            ],
            "siblings": [(row, badge(row.entry.state), age(row)) for row in rows],
        }


async def look(admin: Admin, id_: UUID) -> Detailed | None:
    """Return the delivery with this id, or None if it does not exist or is being removed."""
    own = next((detail for detail in await admin.event(id_) if detail.entry.id == id_), None)
    reason = next((reason for reason in await admin.why(id_) if reason.entry.id == id_), None)
    if own is None or own.content is None or reason is None:
        return None
    asked = {name: await action.ask(admin, [id_], dry_run=True) for name, action in ACTIONS.items()}
    page = await admin.events(Filter(event_id=own.entry.event_id), limit=SIBLINGS + 1)
    offered = [name for name, done in asked.items() if done.affected]
    return own, reason, offered, [entry for entry in page.entries if entry.id != id_]
