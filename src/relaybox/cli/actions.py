"""``relaybox retry``, ``replay``, ``discard``, ``move``, ``pause``, ``resume``, ``send-test``, ``audit``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from relaybox.cli.options import Bulk, Json, Limit, bundled, flag, moment, option, parse_id, run
from relaybox.cli.output import confirm, documents, note, plain, print_json, print_page, tell
from relaybox.core.commands import command
from relaybox.core.text import at, plural
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.operate.admin import Done
    from relaybox.operate.configured import Action

Ids: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Events, with --destination only their deliveries for it, or deliveries; else the filter's.",
    ),
]
Everything: TypeAlias = Annotated[bool, flag("All of them, without a filter.", "--all")]
Name: TypeAlias = Annotated[str, typer.Argument(metavar="DESTINATION")]

SKIPPED: dict[Action, str] = {
    "retry": "neither failed nor backing off",
    "replay": "not final yet, or without a destination",
    "discard": "being sent or final already",
    "move": "being sent at this moment",
}
"""Why each action skips deliveries."""


@bundled
def retry(
    context: typer.Context, ids: Ids = None, everything: Everything = False, *, bulk: Bulk, filter: Any
) -> None:
    """Start failed deliveries again, with all their attempts. By ID also one that backs off: it is due."""
    _do(context, "retry", _what(filter, ids, everything), bulk)


@bundled
def replay(
    context: typer.Context,
    ids: Ids = None,
    to: Annotated[str | None, option("NAME", "To this destination instead.")] = None,
    everything: Everything = False,
    *,
    bulk: Bulk,
    filter: Any,
) -> None:
    """Send delivered, failed or discarded deliveries once more, as new rows of the same events.

    A filter is about delivered ones, unless --status says otherwise. An ID that names several is asked about.
    """
    _do(context, "replay", _what(filter, ids, everything), bulk, to=to)


@bundled
def discard(
    context: typer.Context, ids: Ids = None, everything: Everything = False, *, bulk: Bulk, filter: Any
) -> None:
    """Give up failed or pending deliveries; the next one of each key becomes due.

    A filter is about failed ones, unless --status says otherwise. An ID that names several is asked about.
    """
    _do(context, "discard", _what(filter, ids, everything), bulk)


@bundled
def move(
    context: typer.Context,
    from_: Annotated[str, typer.Argument(metavar="FROM")],
    to: Annotated[str, typer.Argument(metavar="TO")],
    *,
    bulk: Bulk,
) -> None:
    """Give a destination's pending and failed deliveries to another; failed ones stay failed there."""
    _do(context, "move", from_, bulk, to=to)


def pause(
    context: typer.Context,
    destination: Name,
    reason: Annotated[str, option("TEXT", "Why; `status` and `why` show it.")] = "",
    until: Annotated[str | None, option("TIME", "A time, or 1h: so long. Else until it is resumed.")] = None,
    as_json: Json = False,
) -> None:
    """Let nothing more be sent to a destination; what is being sent is finished."""
    end = moment(until, "--until", 1)
    run(context, lambda admin: admin.pause(destination, reason, end))
    document = {"destination": destination, "paused": True, "reason": reason, "until": end}
    tell(as_json, document, f"paused {destination}" + ("" if end is None else f" until {at(end)}"))


def resume(context: typer.Context, destination: Name, as_json: Json = False) -> None:
    """End a pause, and close an open circuit, so that the next claim goes through at once."""
    changed = run(context, lambda admin: admin.resume(destination))
    idle = f"{destination} was not paused, and its circuit is closed"
    document = {"destination": destination, "resumed": changed}
    tell(as_json, document, f"resumed {destination}" if changed else idle)


def send_test(context: typer.Context, destination: Name, as_json: Json = False) -> None:
    """Send an event of the type relaybox.test to a destination, to see whether the whole way works."""
    event_id = run(context, lambda admin: admin.test(destination))
    document = {"destination": destination, "event_id": event_id}
    tell(as_json, document, f"emitted {event_id}; {command(f'why {event_id}')} says where it is")


def audit(
    context: typer.Context,
    limit: Limit = 50,
    cursor: Annotated[int | None, option("NUMBER", "Go on where the last page ended.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """List what operators did, newest first."""
    found = run(context, lambda admin: admin.audits(limit, cursor))
    if as_json:
        print_json(documents().audits(found, found.cursor))
        return
    rows = [
        [
            *(row.id, at(row.at), row.actor, row.action, f"{row.affected:,}"),
            json.dumps(row.details, ensure_ascii=False),
        ]
        for row in found.rows
    ]
    headings = ["ID", "AT", "WHO", "ACTION", "ROWS", "DETAILS"]
    print_page(headings, rows, range(5), found.cursor, "nobody has done anything")


def _what(filter: Any, ids: Sequence[str] | None, everything: bool) -> Any:
    """Return the selection: a filter, or ids that ``--destination`` may narrow."""
    from relaybox.operate.admin import Named
    from relaybox.stores.ledger import EVERYTHING

    rest = replace(filter, destination=None) if ids else filter
    if sum((bool(ids), rest != EVERYTHING, everything)) != 1:
        narrow = "; with ids only --destination goes together" if ids else ""
        raise ConfigError(f"say which: ids, or a filter such as --destination NAME, or --all{narrow}")
    return Named([parse_id(id_) for id_ in ids], filter.destination) if ids else filter


def _do(context: typer.Context, verb: Action, what: Any, bulk: Bulk, **more: Any) -> None:
    done = run(context, lambda admin: _act(partial(getattr(admin, verb), what, **more), verb, what, bulk))
    _tell_done(verb, what, done, bulk)


async def _act(action: Callable[..., Awaitable[Done]], verb: Action, what: Any, bulk: Bulk) -> Done:
    """Act; ask first if the selection is a filter, or if an id names several deliveries."""
    from relaybox.cli.progress import with_bar
    from relaybox.operate.admin import Named

    if bulk.dry_run:
        return await action(dry_run=True)
    if isinstance(what, Named):
        if not (bulk.yes or verb == "retry" or what.destination is not None):
            done = await action(dry_run=True)
            if not done.affected:
                return done
            _confirm_shared(verb, done)
        return await action()
    expected = None
    if not bulk.yes:
        found = await action(dry_run=True)
        if not found.affected:
            return found
        expected = found.affected
        confirm(f"{verb} {plural(expected, 'delivery')}?")
    return await with_bar(expected, verb, lambda progress: action(progress=progress, rate=bulk.rate))


def _confirm_shared(verb: str, done: Done) -> None:
    """Ask if an id names several deliveries: the operator may mean only one of them."""
    if not done.shared:
        return
    names = ", ".join(name or "(unrouted)" for name in done.destinations)
    would = plain(f"{verb} {plural(done.affected, 'delivery')} ({names})")
    several = ", ".join(map(str, done.shared))
    fix = "say which with --destination NAME, or add --yes for all of them"
    confirm(f"{would}?", f"{several} names several deliveries of its event, and this would {would}: {fix}")


def _tell_done(verb: Action, what: Any, done: Done, bulk: Bulk) -> None:
    """Print the result; exit with 1 if an id or fingerprint is unknown, or an id changed nothing."""
    unknown = [str(id_) for id_ in done.unknown]
    unmet = _unmet(what, done)
    if bulk.as_json:
        print_json(documents().done(verb, done, dry_run=bulk.dry_run))
    elif done.affected or not (unknown or done.skipped or unmet):
        would = "would have " if bulk.dry_run else ""
        typer.echo(f"{would}{documents().PAST[verb]} {done.affected:,}")
    if unknown:
        destination = getattr(what, "destination", None)
        where = "" if destination is None else f" for {destination}"
        note(f"no event and no delivery{where} has the id {', '.join(unknown)}")
    if done.skipped:
        idle = f" ({', '.join(map(str, done.idle))})" if done.idle and done.affected else ""
        note(f"{done.skipped:,} left as they are: {SKIPPED[verb]}{idle}")
    if unmet:
        note(unmet)
    if unknown or done.idle or unmet:
        raise typer.Exit(1)


def _unmet(what: Any, done: Done) -> str | None:
    """Return a note if no delivery has the filter's fingerprint."""
    from relaybox.stores.ledger import EVERYTHING

    fingerprint = getattr(what, "fingerprint", None)
    if fingerprint is None or done.affected or done.skipped:
        return None
    rest = "" if replace(what, fingerprint=None) == EVERYTHING else " and fits the rest of the filter"
    return f"no failed delivery has the fingerprint {fingerprint}{rest}; see {command('failures')}"
