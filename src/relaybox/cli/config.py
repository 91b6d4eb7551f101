"""``relaybox config show`` and ``relaybox config check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.options import Json, Options, options

if TYPE_CHECKING:
    from relaybox.cli.effective import Tables


def show(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Show what is left at its default, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show the settings that count, and where each comes from. Secrets are not shown."""
    from relaybox.cli.effective import effective
    from relaybox.cli.output import print_json

    tables = effective(options(context))
    if as_json:
        print_json(
            {table: {name: one._asdict() for name, one in shown.items()} for table, shown in tables.items()}
        )
    else:
        _print(tables, everything)


def _print(tables: Tables, everything: bool) -> None:
    from relaybox.cli.output import plain

    hidden = 0
    for number, (table, settings) in enumerate(tables.items()):
        shown = {
            name: one for name, one in settings.items() if everything or one.chosen or name == "database"
        }
        hidden += len(settings) - len(shown)
        lines = {plain(f"{name} = {one.text}"): plain(one.source) for name, one in shown.items()}
        width = max(map(len, lines), default=0)
        typer.echo(("\n" if number else "") + plain(f"[{table}]"))
        for line, source in lines.items():
            typer.echo(f"{line:<{width}}  # {source}")
    if hidden:
        typer.echo(f"\n# {hidden} more are at their defaults; --all shows them")


def check(context: typer.Context, as_json: Json = False) -> None:
    """Check everything a relay needs: settings, secrets, sinks, handlers, packages, database and tables.

    All that is wrong is told, on standard error, and the status is 2.
    """
    from relaybox.cli.output import plain, print_json

    found = _look(options(context))
    if as_json:
        wrong = [one for one in found if not one["ok"]]
        print_json({"ok": not wrong, "checks": found})
    else:
        width = max(len(plain(one["what"])) for one in found)
        for one in found:
            mark = "ok   " if one["ok"] else "wrong"
            said = plain(f"{mark} {one['what']:<{width}}  {one['text']}")
            typer.echo(said, err=not one["ok"])
    if not all(one["ok"] for one in found):
        raise typer.Exit(2)


def _look(given: Options) -> list[dict[str, Any]]:
    """Each thing that was looked at, whether it is right, and what there is to say of it."""
    from relaybox.cli.checks import checks
    from relaybox.errors import RelayboxError

    try:
        outbox = given.outbox()
    except RelayboxError as error:
        return [_found("settings", str(error), ok=False)]
    found = [_found("settings", given.sources(outbox), ok=True)]
    for one in checks(outbox, given):
        try:
            found.append(_found(one.what, one.run(), ok=True))
        except RelayboxError as error:
            found.append(_found(one.what, str(error), ok=False))
    return found


def _found(what: str, text: str, *, ok: bool) -> dict[str, Any]:
    return {"what": what, "ok": ok, "text": " ".join(text.split())}
