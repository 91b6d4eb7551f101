"""``relaybox why``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import Json
from relaybox.cli.output import complain, parse_id, plain, print_json, run

if TYPE_CHECKING:
    from relaybox.why import Reason


def why(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of an event, or of one of its deliveries.")],
    as_json: Json = False,
) -> None:
    """Say in one sentence where an event is, and why."""
    from relaybox.cli.documents import reason_document

    wanted = parse_id(id_)
    reasons = run(context, lambda admin: admin.why(wanted))
    if as_json:
        print_json([reason_document(reason) for reason in reasons])
    if not reasons:
        complain(f"no event and no delivery has the id {wanted}; it may have been pruned, or never committed")
    if not as_json:
        for reason in reasons:
            typer.echo(sentence(reason))


def sentence(reason: Reason) -> str:
    """A whole sentence about one delivery."""
    entry = reason.entry
    where = f" for {entry.destination}" if entry.destination else ""
    return plain(f"{entry.id} ({entry.event_type}{where}) {reason.text}.")
