"""``relaybox retry``, ``replay``, ``discard``, ``move``, ``pause`` and ``resume``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from relaybox.cli.filters import filtered
from relaybox.cli.operate import DryRun, Yes, bulk, complain, confirm, parse_id, parse_moment, print_json, run
from relaybox.cli.options import Json
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.admin import Admin, Done

Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Events or deliveries; else the filter's.")
]
Everything: TypeAlias = Annotated[bool, typer.Option("--all", help="All of them, without a filter.")]
Name: TypeAlias = Annotated[str, typer.Argument(metavar="DESTINATION")]
Action: TypeAlias = Callable[..., Awaitable["Done"]]


@filtered
def retry(
    context: typer.Context,
    filter: Any,
    ids: Ids = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Start failed deliveries anew, with all their attempts. By ID also one that backs off: it is due now."""
    what = _what(filter, ids, everything)
    done = run(context, lambda admin: _act(admin.retry, "retry", what, dry_run, yes))
    _tell("retried", done, dry_run, as_json, "neither failed nor backing off")


@filtered
def replay(
    context: typer.Context,
    filter: Any,
    ids: Ids = None,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="To this destination instead.")] = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Send delivered, failed or discarded deliveries once more, as new rows of the same events.

    A filter is about delivered ones, unless --status says otherwise.
    """
    what = _what(filter, ids, everything)

    async def work(admin: Admin) -> Done:
        async def action(what: Any, **options: Any) -> Done:
            return await admin.replay(what, to=to, **options)

        return await _act(action, "replay", what, dry_run, yes)

    _tell("replayed", run(context, work), dry_run, as_json, "not final yet, or without a destination")


@filtered
def discard(
    context: typer.Context,
    filter: Any,
    ids: Ids = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Give up failed or pending deliveries; the next one of each key becomes due.

    A filter is about failed ones, unless --status says otherwise.
    """
    what = _what(filter, ids, everything)
    done = run(context, lambda admin: _act(admin.discard, "discard", what, dry_run, yes))
    _tell("discarded", done, dry_run, as_json, "being sent or final already")


def move(
    context: typer.Context,
    from_: Annotated[str, typer.Argument(metavar="FROM")],
    to: Annotated[str, typer.Argument(metavar="TO")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Give a destination's pending and failed deliveries to another; failed ones stay failed there."""

    async def work(admin: Admin) -> Done:
        async def action(what: Any, **options: Any) -> Done:
            return await admin.move(from_, to, **options)

        return await _act(action, "move", None, dry_run, yes)

    _tell("moved", run(context, work), dry_run, as_json, "being sent at this moment", strict=False)


def pause(
    context: typer.Context,
    destination: Name,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; `status` and `why` show it.")] = "",
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="A time, or 1h: so long. Else until it is resumed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let nothing more be sent to a destination; what is being sent is finished."""
    from datetime import UTC

    from relaybox.why import at

    end = None if until is None else parse_moment(until, "--until", 1)
    run(context, lambda admin: admin.pause(destination, reason, end))
    if as_json:
        told = None if end is None else end.astimezone(UTC).isoformat()
        print_json({"destination": destination, "paused": True, "reason": reason, "until": told})
    else:
        typer.echo(f"paused {destination}" + ("" if end is None else f" until {at(end)}"))


def resume(context: typer.Context, destination: Name, as_json: Json = False) -> None:
    """End a pause, and close an open circuit, so that the next claim goes through at once."""
    changed = run(context, lambda admin: admin.resume(destination))
    if as_json:
        print_json({"destination": destination, "resumed": changed})
    else:
        idle = f"{destination} was not paused, and its circuit is closed"
        typer.echo(f"resumed {destination}" if changed else idle)


def _what(filter: Any, ids: Sequence[str] | None, everything: bool) -> Any:
    from relaybox.ledger import EVERYTHING

    if sum((bool(ids), filter != EVERYTHING, everything)) != 1:
        raise ConfigError("say which: ids, or a filter such as --destination NAME, or --all")
    return [parse_id(id_) for id_ in ids] if ids else filter


async def _act(action: Action, verb: str, what: Any, dry_run: bool, yes: bool) -> Done:
    """Ids are done at once; whatever else there may be many of is counted and confirmed first."""
    if dry_run or isinstance(what, list):
        return await action(what, dry_run=dry_run)
    expected = None if yes else (await action(what, dry_run=True)).affected
    if expected is not None:
        confirm(f"{verb} {expected:,} {'delivery' if expected == 1 else 'deliveries'}?")
    return await bulk(expected, verb, lambda progress: action(what, progress=progress))


def _tell(verb: str, done: Done, dry_run: bool, as_json: bool, why_not: str, *, strict: bool = True) -> None:
    """What became of it; the status is 1 where an id that was asked for was not found or not ready."""
    unknown = [str(id_) for id_ in done.unknown]
    if as_json:
        print_json({verb: done.affected, "skipped": done.skipped, "unknown": unknown, "dry_run": dry_run})
    elif done.affected or not (unknown or done.skipped):
        typer.echo(f"{'would have ' if dry_run else ''}{verb} {done.affected:,}")
    if unknown:
        complain(f"no event and no delivery has the id {', '.join(unknown)}")
    if done.skipped:
        said = f"{done.skipped:,} left as they are: {why_not}"
        if strict:
            complain(said)
        typer.echo(f"relaybox: {said}", err=True)
