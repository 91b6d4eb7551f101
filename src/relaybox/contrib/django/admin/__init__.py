"""The outbox in Django's admin: what is where and why, and three things to do about it.

Everything is asked of the operators' service, as in the command line and the dashboard. Users who may
``view`` outbox events see them; the permissions ``retry``, ``replay`` and ``discard`` each allow that action.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partialmethod
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse

from relaybox.contrib.django.admin import display
from relaybox.contrib.django.admin.changelist import (
    ACTIONS,
    FROM_DETAIL,
    Action,
    AgeFilter,
    DestinationFilter,
    EventList,
    StatusFilter,
    row_of,
    run,
)
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.outbox import ask
from relaybox.contrib.django.private import redirect_from_missing
from relaybox.operate.admin import Admin

T = TypeVar("T")

ACTOR = 200
"""The longest name that the audit takes."""


class OutboxAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """An admin that shows and never edits, in the database of ``using`` or of the project's routers."""

    using: str | None = None

    class Media:
        """Follows the colours of Django's themes."""

        css: ClassVar = {"all": ("relaybox/admin.css",)}

    def get_using(self, request: HttpRequest) -> str:
        """Return the alias of the database that is shown."""
        return self.using or str(router.db_for_write(self.model))

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the rows of that database."""
        return super().get_queryset(request).using(self.get_using(request))

    def ask(self, request: HttpRequest, work: Callable[[Admin], Awaitable[T]]) -> T:
        """Do the work with the operators' service, in the name of the user."""
        return ask(self.get_using(request), request.user.get_username()[:ACTOR], work)

    def may(self, request: HttpRequest, what: str) -> bool:
        """True if the user has that permission of the model."""
        name = f"{self.opts.app_label}.{get_permission_codename(what, self.opts)}"
        return bool(request.user.has_perm(name))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """False: events are emitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """False: relays and the actions change them."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """False: retention removes them."""
        return False


def _action(action: Action) -> Callable[..., HttpResponse]:
    """Return the method of an action, for users who have its permission."""

    def method(self: OutboxAdmin, request: HttpRequest, queryset: Any) -> HttpResponse:
        return run(action, self, request, queryset)

    described = admin.action(description=f"{action.title} selected deliveries", permissions=[action.name])
    return described(method)  # type: ignore[no-any-return]


@admin.register(OutboxEvent)
class OutboxEventAdmin(OutboxAdmin):
    """The deliveries."""

    list_display = (
        *("state", "event_type", "aggregate", "destination"),
        *("attempts_made", "age", "next_attempt", "error"),
    )
    list_display_links = ("event_type",)
    list_filter = (StatusFilter, DestinationFilter, AgeFilter)
    list_per_page = 50
    sortable_by = ()
    search_fields = ("aggregate_type", "aggregate_id", "event_id", "event_type")
    search_help_text = "An aggregate, such as order 17 or order:17; an event’s ID; or an event type."
    actions = ("retry", "replay", "discard")
    show_full_result_count = False
    # Counts are for those who have time. Django 4.2 does not offer them.
    show_facets = getattr(getattr(admin, "ShowFacets", None), "NEVER", None)

    @admin.display(description="status")  # type: ignore[untyped-decorator]
    def state(self, row: OutboxEvent) -> str:
        """Return where it is."""
        return display.badge(row.entry.state)

    def aggregate(self, row: OutboxEvent) -> str:
        """Return what it is about."""
        return f"{row.aggregate_type} {row.aggregate_id}"

    @admin.display(description="attempts")  # type: ignore[untyped-decorator]
    def attempts_made(self, row: OutboxEvent) -> str:
        """Return how many of how many."""
        return f"{row.attempts} of {row.max_attempts}"

    def age(self, row: OutboxEvent) -> str:
        """Return how long ago it was emitted."""
        return display.age(row.entry)

    def next_attempt(self, row: OutboxEvent) -> str:
        """Return when it is sent next."""
        return display.next_attempt(row.entry)

    def error(self, row: OutboxEvent) -> str:
        """Return the last error."""
        return display.error(row.entry)

    retry, replay, discard = map(_action, ACTIONS.values())
    has_retry_permission = partialmethod(OutboxAdmin.may, what="retry")
    has_replay_permission = partialmethod(OutboxAdmin.may, what="replay")
    has_discard_permission = partialmethod(OutboxAdmin.may, what="discard")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[EventList]:
        """Return the list that asks the service."""
        return EventList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list, and run the actions on it."""
        context = {"title": str(self.opts.verbose_name_plural).capitalize(), **(extra_context or {})}
        return super().changelist_view(request, context)

    def response_action(self, request: HttpRequest, queryset: Any, **kwargs: Any) -> HttpResponse | None:
        """Run the action, and report an id that is not a delivery's.

        From Django 6.1, ``kwargs`` say from which page it comes.
        """
        try:
            return super().response_action(request, queryset, **kwargs)
        except ValidationError as error:
            self.message_user(request, " ".join(error.messages), messages.ERROR)
            return None

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show everything about one delivery."""
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        detailed = self._look(request, unquote(object_id))
        if detailed is None:
            return redirect_from_missing(self, request, object_id)
        context = {**self._context(request, detailed), **(extra_context or {})}
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/relaybox/outboxevent/change_form.html", context)

    def _look(self, request: HttpRequest, object_id: str) -> display.Detailed | None:
        try:
            id_ = UUID(object_id)
        except ValueError:
            return None
        return self.ask(request, lambda admin: display.look(admin, id_))

    def _context(self, request: HttpRequest, detailed: display.Detailed) -> dict[str, Any]:
        entry, content = detailed.entry, detailed.content
        using, listing = self.get_using(request), display.listing_of(self.model, self.admin_site.name)
        return {
            **self.admin_site.each_context(request),
            "title": str(row_of(entry, using)),
            "opts": self.opts,
            "media": self.media,
            "original": row_of(entry, using),
            "preserved_filters": self.get_preserved_filters(request),
            "state": display.badge(entry.state),
            "why": display.sentence(detailed.reason),
            "offered": [ACTIONS[name] for name in detailed.offered if self.may(request, name)],
            "from_detail": FROM_DETAIL,
            "sections": [
                ("Event", list(display.facts_of_event(entry, listing))),
                ("Delivery", list(display.facts_of_delivery(entry, listing))),
            ],
            "payload": display.payload(content),
            "headers": display.document(content.headers),
            "attempts": [(a, display.moment(a.failed_at, entry.seen_at)) for a in detailed.attempts],
            "siblings": [
                (row_of(other, using), display.badge(other.state), display.age(other))
                for other in detailed.siblings
            ],
        }
