"""``relaybox verify``."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.options import Json, Since, Until, flag, moment, option, run
from relaybox.cli.output import answer, note, plain
from relaybox.core.text import plural
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.cli.comparison import Comparison, Difference, Terms

EXIT_STATUS = """Exit status: 0 nothing is amiss; 1 something is lost, a phantom, out of order or altered
(with --strict: or a duplicate), or nothing was compared; 2 wrong usage, a wrong setting, a line that cannot
be read, or the database refused: one line on standard error says why; 130 interrupted."""

MEANINGS = {
    "events": "compared",
    "recorded": "of them recorded",
    "lost": "delivered, but not recorded",
    "phantom": "recorded, but not committed",
    "disorder": "recorded before an earlier event of their key",
    "altered": "recorded with another payload",
    "duplicate": "recorded once more, as at-least-once delivery may",
    "pending": "not recorded yet: pending, delivered just now, or in shadow",
    "failed": "not recorded: failed, and shown as such",
    "discarded": "not recorded: discarded",
    "pruned": "recorded, but older than what is kept",
    "outside": "recorded, but outside --since and --until",
}
DIFFERENCES: tuple[Difference, ...] = ("lost", "phantom", "disorder", "altered", "duplicate")
ALWAYS = ("events", "recorded", "lost", "phantom", "disorder", "altered")
JUDGED_BY = {"disorder": "keyed", "altered": "payloads"}
"""For kinds that apply only to some events or records, the name of the count of those."""


def verify(
    context: typer.Context,
    destination: Annotated[str, typer.Argument(metavar="DESTINATION")],
    recorded: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECORDED]",
            help="A file, or - for standard input. A line is an event id, or a JSON object with event_id, "
            "webhook-id or id, and perhaps data or payload.",
        ),
    ] = None,
    inbox: Annotated[
        str | None, option("CONSUMER", "Instead of a file: what this consumer has in inbox_message.")
    ] = None,
    since: Since = None,
    until: Until = None,
    strict: Annotated[bool, flag("Duplicates count as differences.", "--strict")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many of each kind.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare what a destination's consumer recorded with what was committed for it.

    RECORDED has one delivery a line, in order of arrival. Payloads are compared as JSON values.
    """
    from relaybox.cli import comparison

    if (recorded is None) == (inbox is None):
        raise ConfigError("say what was recorded: a file, or - for standard input, or --inbox CONSUMER")
    first, last = moment(since, "--since"), moment(until, "--until")
    configured, now = run(context, lambda admin: comparison.begin(admin, destination))
    on_failed = "skip" if configured and configured.on_failed == "skip" else "block"

    def place(number: int) -> str:
        if inbox is None:
            return f"line {number}"
        return (comparison.EPOCH + timedelta(microseconds=number)).isoformat()

    terms = comparison.Terms(destination, on_failed, first, last, place)
    done = comparison.Comparison(limit, strict)
    with comparison.open_histories() as histories:
        if recorded is not None:
            comparison.read(recorded, histories)
        end = run(context, lambda admin: comparison.gather(admin, inbox, histories, terms, now, done))
        if configured is not None:
            # An emitter's clock may be ahead, so a pruned event may look younger than it was.
            kept_since = end - timedelta(seconds=configured.retention) + comparison.MARGIN
            terms = replace(terms, kept_since=kept_since)
        comparison.compare(histories, terms, done)
    answer(done, as_json, lambda done: _document(done, terms), lambda done: _tell(done, terms))
    if not done.ok:
        raise typer.Exit(1)


def _document(done: Comparison, terms: Terms) -> dict[str, Any]:
    findings = [
        {"kind": kind, "event_id": str(event), "text": text}
        for kind in DIFFERENCES
        for event, text in done.findings[kind]
    ]
    counts = {name: done.counts[name] for name in ("records", *MEANINGS, "keyed", "payloads")}
    return {"destination": terms.destination, "ok": done.ok, **counts, "findings": findings}


def _tell(done: Comparison, terms: Terms) -> None:
    for name, meaning in MEANINGS.items():
        if name in ALWAYS or done.counts[name]:
            judged = name not in JUDGED_BY or done.counts[JUDGED_BY[name]]
            typer.echo(f"{name:<10}{f'{done.counts[name]:,}' if judged else '-':>12}  {meaning}")
    for kind in DIFFERENCES:
        found = done.findings[kind]
        for event, text in found:
            typer.echo(plain(f"{kind} {event}: {text}"))
        if (rest := done.counts[kind] - len(found)) > 0 and found:
            typer.echo(f"{kind}: {rest:,} more; --limit shows them")
    _tell_limits(done, terms)
    typer.echo(_verdict(done))


def _tell_limits(done: Comparison, terms: Terms) -> None:
    if done.newest_lost and done.oldest_record and done.newest_lost < done.oldest_record:
        since = done.oldest_record.strftime("%Y-%m-%dT%H:%M:%SZ")
        note(f"all that is lost is older than what was recorded: if records begin later, --since {since}")
    if not done.counts["events"]:
        return
    if not done.counts["keyed"]:
        note(f"no event of {terms.destination} has an ordering key, so order was not compared")
    if not done.has_payloads:
        note("no payload was recorded, so none was compared")
    elif not done.counts["payloads"]:
        note("no payload that was recorded could be compared with a stored one")


def _verdict(done: Comparison) -> str:
    if not done.counts["events"]:
        return f"nothing was compared: {_why_nothing(done)}"
    again = done.counts["duplicate"]
    found = plural(done.differences, "difference") if done.differences else "nothing is amiss"
    return f"{found}; {plural(again, 'duplicate')}" if again and not done.strict else found


def _why_nothing(done: Comparison) -> str:
    places = {
        "outside": "outside --since and --until",
        "pruned": "older than what is kept (retention)",
        "phantom": "without a row",
    }
    found = [(done.counts[kind], words) for kind, words in places.items() if done.counts[kind]]
    total = sum(number for number, _ in found)
    if total == 1:
        return f"the one event that was recorded is {found[0][1]}"
    if len(found) == 1:
        return f"all of the {total:,} events that were recorded are {found[0][1]}"
    return ", ".join([f"{total:,} events were recorded", *(f"{number:,} {words}" for number, words in found)])
