"""The options that choose deliveries, defined once for every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from relaybox.cli.options import Since, Until, parse_id, parse_moment

if TYPE_CHECKING:
    from relaybox.stores.ledger import Filter


class Status(StrEnum):
    """The states that can be asked for."""

    pending = "pending"
    due = "due"
    scheduled = "scheduled"
    parked = "parked"
    sending = "sending"
    processing = "processing"
    delivered = "delivered"
    completed = "completed"
    failed = "failed"
    discarded = "discarded"


def criteria(
    status: Annotated[
        Status | None, typer.Option(help="pending is due, scheduled or parked; processing is sending.")
    ] = None,
    destination: Annotated[str | None, typer.Option(metavar="NAME", help="Of this destination.")] = None,
    event_type: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Of this event type.")
    ] = None,
    aggregate_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this kind of aggregate.")
    ] = None,
    aggregate_id: Annotated[str | None, typer.Option(metavar="ID", help="Of this aggregate.")] = None,
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="Of this ordering key.")] = None,
    event: Annotated[str | None, typer.Option(metavar="ID", help="Of this event.")] = None,
    since: Since = None,
    until: Until = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose last error holds this text.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="TEXT", help="That failed so, as `failures` names it.")
    ] = None,
) -> Filter:
    """Return the filter that these options describe."""
    from relaybox.stores.ledger import Filter

    return Filter(
        status=None if status is None else status.value,
        destination=destination,
        event_type=event_type,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        ordering_key=key,
        event_id=None if event is None else parse_id(event),
        since=None if since is None else parse_moment(since, "--since", -1),
        until=None if until is None else parse_moment(until, "--until", -1),
        error=error,
        fingerprint=fingerprint,
    )


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a filter; it gets them as one value, ``filter``."""
    options = list(inspect.signature(criteria).parameters.values())
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "filter"]

    @functools.wraps(command)
    def with_filter(**given: Any) -> None:
        chosen = criteria(**{option.name: given.pop(option.name) for option in options})
        command(filter=chosen, **given)

    as_keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
    hints = get_type_hints(criteria, include_extras=True, localns={"Filter": Any})
    hints |= get_type_hints(command, include_extras=True)
    # What the command line is made of.
    with_filter.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=hints[each.name]) for each in as_keywords]
    )
    with_filter.__annotations__ = {each.name: hints[each.name] for each in as_keywords}
    del with_filter.__wrapped__
    return with_filter
