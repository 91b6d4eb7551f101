"""``relaybox doctor``."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.logs import colours
from relaybox.cli.options import Json, Options, option, options
from relaybox.cli.output import answer, plain
from relaybox.core.settings import ConfigWarning
from relaybox.core.text import plural
from relaybox.errors import RelayboxError

if TYPE_CHECKING:
    from relaybox.operate.doctor import Report

EXIT_STATUS = """Exit status: 0 no error was found (there may be warnings); 1 an error was found; 2 wrong
usage: one line on standard error says why; 130 interrupted."""

_COLOURS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "info": typer.colors.CYAN}
_INDENT = " " * 9


def doctor(
    context: typer.Context,
    only: Annotated[list[str] | None, option("NAME", "Only this check; may be repeated.", "--only")] = None,
    skip: Annotated[list[str] | None, option("NAME", "Not this check; may be repeated.", "--skip")] = None,
    as_json: Json = False,
) -> None:
    """Look for what is wrong: database, tables, rights, sinks, rows, relays. Each finding says what fixes it.

    Nothing is changed, nothing is sent, and the big table is not scanned. The checks: settings, sinks,
    database, isolation, durability, schema, privileges, listener, clock, transactions, vacuum, destinations,
    payloads, relays.
    """
    from relaybox.operate.doctor import choose

    names = (tuple(only or ()), tuple(skip or ()))
    choose(*names)
    report = _examine(options(context), *names)
    answer(report, as_json, lambda report: {"ok": not report.sick, **asdict(report)}, _show)
    if report.sick:
        raise typer.Exit(1)


def _examine(given: Options, only: tuple[str, ...], skip: tuple[str, ...]) -> Report:
    """Return the report; if the settings cannot be read, that is its only finding."""
    import asyncio
    import logging

    from relaybox.operate.doctor import Finding, Report, examine

    try:
        # The doctor reports them as findings.
        with warnings.catch_warnings(action="ignore", category=ConfigWarning):
            outbox = given.outbox()
    except RelayboxError as error:
        seen, _, fix = " ".join(str(error).split()).rpartition("; ")
        finding = Finding("error", "the settings cannot be read", seen or fix, fix, "settings")
        return Report((finding,), (), ("settings",))
    # Silence drivers and sinks: the findings report the same.
    root, nowhere = logging.getLogger(), logging.NullHandler()
    root.addHandler(nowhere)
    try:
        return asyncio.run(examine(outbox.settings, outbox.handlers, only=only, skip=skip))
    finally:
        root.removeHandler(nowhere)


def _show(report: Report) -> None:
    coloured = colours(sys.stdout)
    for finding in report.findings:
        level = f"{finding.level:<8} "
        if coloured:
            level = typer.style(level, fg=_COLOURS[finding.level], bold=True)
        typer.echo(f"{level}{plain(finding.title)} ({finding.check})")
        typer.echo(f"{_INDENT}{plain(finding.detail)}")
        for number, line in enumerate(finding.fix.splitlines()):
            typer.echo(f"{_INDENT}{'fix: ' if number == 0 else '     '}{plain(line)}")
        typer.echo()
    for one in report.unseen:
        typer.echo(plain(f"not looked at ({one.check}): {one.reason}"))
    levels = [finding.level for finding in report.findings]
    words = {"error": "error", "warning": "warning", "info": "note"}
    counts = [plural(levels.count(level), word) for level, word in words.items() if level in levels]
    typer.echo(f"{', '.join(counts) or 'nothing found'} ({plural(len(report.checks), 'check')})")
