"""The admin's actions on the selected deliveries: confirm, do, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from relaybox.contrib.django.dispatch import after_commit
from relaybox.contrib.django.models import OutboxEvent
from relaybox.operate.admin import Admin, Done, Named

CONFIRMED = "confirmed"
FROM_DETAIL = "from_detail"


@dataclass(frozen=True, slots=True)
class Action:
    """A verb of the operators' service, and how pages speak of it."""

    name: str
    done: str
    effect: str
    condition: str

    @property
    def title(self) -> str:
        """Return the text of a button."""
        return self.name.capitalize()

    async def ask(self, admin: Admin, ids: Sequence[UUID], *, dry_run: bool) -> Done:
        """Do it to these deliveries, and to no others of their events."""
        verb = {"retry": admin.retry, "replay": admin.replay, "discard": admin.discard}[self.name]
        return await verb(Named(ids, exact=True), dry_run=dry_run)


RETRY = Action(
    "retry",
    "Retried",
    "They start anew, with all their attempts, at their old place in the order.",
    "Only deliveries that failed or wait for another attempt can be retried.",
)
REPLAY = Action(
    "replay",
    "Replayed",
    "Each is sent once more as a new delivery of the same event, with a header that says so.",
    "Only deliveries that are delivered, failed or discarded can be replayed, to a destination that exists.",
)
DISCARD = Action(
    "discard",
    "Discarded",
    "They are given up and not sent. What waits behind them goes on. A discarded delivery can be replayed.",
    "What is being sent, or is delivered or discarded already, cannot be discarded.",
)
ACTIONS = {action.name: action for action in (RETRY, REPLAY, DISCARD)}


def run(action: Action, model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse:
    """Ask for a confirmation, or do it to the selected deliveries once that is given."""
    # Once more: a request that claims to select across pages has got a queryset of everything.
    rows = list(
        queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)).defer("payload", "headers")
    )
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
        # So that they are looked at now, and not only at the next sweep.
        connection = connections[model_admin.get_using(request)]
        after_commit(connection, [(row.destination, str(row.pk)) for row in taken])
        for row in taken:
            model_admin.log_change(request, row, f"{action.done} by way of the admin.")
    return HttpResponseRedirect(_address(model_admin, request))


def _confirmation(
    action: Action, model_admin: Any, request: HttpRequest, taken: list[OutboxEvent], left: list[OutboxEvent]
) -> HttpResponse:
    opts = model_admin.opts
    number = f"{len(taken)} deliver{'y' if len(taken) == 1 else 'ies'}"
    context = {
        **model_admin.admin_site.each_context(request),
        "title": f"{action.title} {number}?",
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
    template = f"admin/{opts.app_label}/{opts.model_name}/confirm.html"
    return TemplateResponse(request, template, context)


def _say(action: Action, model_admin: Any, request: HttpRequest, taken: list[OutboxEvent], left: int) -> None:
    if taken:
        text = f"{action.done} {_counted(taken)}."
        model_admin.message_user(request, text, messages.SUCCESS)
    if left:
        text = f"Left {left} as {'it is' if left == 1 else 'they are'}. {action.condition}"
        model_admin.message_user(request, text, messages.WARNING)
    if not taken and not left:
        text = "Nothing was done: what was selected does not exist any more."
        model_admin.message_user(request, text, messages.WARNING)


def _address(model_admin: Any, request: HttpRequest) -> str:
    """Return the address of the page where the action was chosen."""
    if FROM_DETAIL not in request.POST:
        return str(request.get_full_path())
    opts = model_admin.opts
    name = f"admin:{opts.app_label}_{opts.model_name}_change"
    id_ = request.POST.get(ACTION_CHECKBOX_NAME)
    url = reverse(name, args=[id_], current_app=model_admin.admin_site.name)
    filters = request.POST.get(FROM_DETAIL)
    return str(add_preserved_filters({"preserved_filters": filters, "opts": opts}, url))


def _counted(rows: Iterable[OutboxEvent]) -> str:
    """Return how many for which destination, such as ``2 to billing, 1 to search``."""
    numbers = Counter(row.destination for row in rows)
    return ", ".join(f"{number} to {name or '(none)'}" for name, number in sorted(numbers.items()))
