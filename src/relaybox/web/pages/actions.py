"""``/actions/…``: the forms of operators. Each redirects to a page with a message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, cast
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import parse_duration
from relaybox.core.text import plural, shortened
from relaybox.core.values import parsed
from relaybox.errors import ConfigError
from relaybox.operate.admin import Admin, Done, Named
from relaybox.operate.bulk import TooManyOperations
from relaybox.operate.configured import Action
from relaybox.operate.documents import PAST
from relaybox.stores.ledger import Filter
from relaybox.web.pages.events import FIELDS, Wrong, chosen, filter_of
from relaybox.web.templating import back, error_page, page, redirect

Form: TypeAlias = Mapping[str, str]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

EFFECTS: Mapping[Action, str] = {
    "retry": "They start again, with all their attempts, at their old place in the order.",
    "replay": "Each is sent again as a new delivery of the same event, with a header that says so.",
    "discard": "They are given up for good; what waits behind them goes on.",
}
LONGEST_REASON = 500


def acting(otherwise: str, do: Callable[[Request, Form], Awaitable[tuple[str, str]]]) -> Endpoint:
    """Return an endpoint that runs ``do`` and redirects to its page with its message, or with the error."""

    async def endpoint(request: Request) -> Response:
        given: Form = request.state.form
        try:
            path, message = await do(request, given)
        except (Wrong, ConfigError, TooManyOperations) as wrong:
            return redirect(request, back(given.get("back"), otherwise), str(wrong), "trouble")
        return redirect(request, path, message)

    return endpoint


async def confirm(request: Request) -> Response:
    """Show how many deliveries an action affects, and the form that starts it."""
    query, admin = request.query_params, request.state.admin
    action = cast(Action, query.get("action", ""))
    if action not in EFFECTS:
        return error_page(request, 400, "No such action", f"It is one of {', '.join(EFFECTS)}.")
    given, one = chosen(query), query.get("id")
    try:
        count, capped = await _count(request, action, given, one)
    except (Wrong, ConfigError) as wrong:
        return error_page(request, 400, "This cannot be done", str(wrong))
    deliveries = plural(count, "delivery", "+" if capped else "")
    return page(
        request,
        "confirm.html",
        title=f"{action.capitalize()} {deliveries}?",
        button=f"{action.capitalize()} {deliveries}",
        effect=EFFECTS[action] if count else "Nothing is in a state for this now.",
        action=action,
        count=count,
        single=one is not None,
        filter=[("Delivery", one)] if one else [(FIELDS[name], value) for name, value in given.items()],
        fields=[("id", one)] if one else list(given.items()),
        back=f"/events/{one}" if one else "/failures" if "fingerprint" in given else "/events",
        names=sorted(name for name, about in (await admin.destinations()).items() if not about.handed_over),
    )


async def _count(request: Request, action: Action, given: Form, one: str | None) -> tuple[int, bool]:
    admin = request.state.admin
    if one is not None:
        return (await _do(admin, action, one, None, dry_run=True)).affected, False
    counted = await admin.count(action, _filter(request, given))
    return counted.count, counted.capped


def _filter(request: Request, given: Form) -> Filter:
    """Return the filter of these fields; raise if it is empty, because it would match everything."""
    if not given:
        raise Wrong("Name at least one thing that they have in common.")
    return filter_of(request, given)


def _id(text: str) -> UUID:
    if (found := parsed(UUID, text)) is None:
        raise Wrong(f"{shortened(text, 40)!r} is not an id.")
    return found


async def _do(admin: Admin, action: Action, one: str, to: str | None, *, dry_run: bool = False) -> Done:
    options: dict[str, Any] = {"to": to} if action == "replay" else {}
    done: Done = await getattr(admin, action)(Named([_id(one)], exact=True), dry_run=dry_run, **options)
    return done


def _changing(action: Action) -> Endpoint:
    """Return an endpoint that changes one delivery at once, or those of a filter in the background."""

    async def do(request: Request, given: Form) -> tuple[str, str]:
        to = given.get("to") or None
        if "id" in given:
            done = await _do(request.state.admin, action, given["id"], to)
            if not done.affected:
                raise Wrong("Nothing was changed: it is not in a state for this any more.")
            message = f"{PAST[action].capitalize()} 1 delivery to {to or done.destinations[0]}."
            return back(given.get("back"), "/events"), message
        filter, rate = _filter(request, chosen(given)), _rate(given.get("rate", ""))
        await request.app.service.bulk().start(request.state.user.name, action, filter, to=to, rate=rate)
        return "/operations", f"The {action} has begun; it goes on in the background."

    return acting("/events", do)


def _rate(text: str) -> float | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text)):
        raise Wrong(f"At most a second: {shortened(text, 20)!r} is not a number from 1 to 999999.")
    return float(text)


async def _pause(request: Request, given: Form) -> tuple[str, str]:
    name = given.get("destination", "")
    reason = given.get("reason", "").strip()
    if not reason:
        raise Wrong("Reason: write why, for anyone who finds it paused.")
    until = None
    if given.get("for"):
        seconds = parse_duration(given["for"], "until")
        if not seconds:
            raise Wrong("For how long: a pause needs a length.")
        until = datetime.now(UTC) + timedelta(seconds=min(seconds, 366 * 86_400))
    await request.state.admin.pause(name, reason[:LONGEST_REASON], until)
    return back(given.get("back"), "/destinations"), f"Paused {name}."


async def _resume(request: Request, given: Form) -> tuple[str, str]:
    name = given.get("destination", "")
    was = await request.state.admin.resume(name)
    message = f"Resumed {name}." if was else f"Nothing held {name} up."
    return back(given.get("back"), "/destinations"), message


async def _test(request: Request, given: Form) -> tuple[str, str]:
    event_id = await request.state.admin.test(given.get("destination", ""))
    return f"/events/{event_id}", "A test event was written. Here is where it is."


async def _move(request: Request, given: Form) -> tuple[str, str]:
    filter = Filter(destination=given.get("destination", ""))
    to = given.get("to", "")
    await request.app.service.bulk().start(request.state.user.name, "move", filter, to=to)
    return "/operations", f"The move to {to} has begun; it goes on in the background."


async def _cancel(request: Request, given: Form) -> tuple[str, str]:
    if await request.state.admin.cancel(_id(given.get("id", ""))):
        return "/operations", "It ends after what it is doing now."
    raise Wrong("It does not run any more.")


ACTIONS: Mapping[str, Endpoint] = {
    **{action: _changing(action) for action in EFFECTS},
    "pause": acting("/destinations", _pause),
    "resume": acting("/destinations", _resume),
    "test": acting("/destinations", _test),
    "move": acting("/destinations", _move),
    "cancel": acting("/operations", _cancel),
}
