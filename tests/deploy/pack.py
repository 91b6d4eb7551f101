"""The deploy pack, read: its files, the rules, the dashboard, and commands as the command line sees them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer
import yaml

from relaybox.cli import app
from relaybox.cli.commands import Group, global_first
from tests.docs.failures import ROOT, line_at

DEPLOY = ROOT / "deploy"
RUNBOOK = ROOT / "docs" / "runbook"
RULES = DEPLOY / "prometheus" / "rules.yml"


def rules() -> list[dict[str, Any]]:
    """Return every rule."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Return the rules that are alerts."""
    return [rule for rule in rules() if "alert" in rule]


def dashboard() -> dict[str, Any]:
    """Return the dashboard of Grafana."""
    return json.loads((DEPLOY / "grafana" / "relaybox.json").read_text())  # type: ignore[no-any-return]


def panels() -> list[dict[str, Any]]:
    """Return its panels, without the headings."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def manifests() -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each Kubernetes manifest."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return {file.name: list(yaml.safe_load_all(file.read_text())) for file in files}


def check_command(words: list[str]) -> None:
    """Raise what the command line would say of these arguments of ``relaybox``; nothing is run."""
    command = _whole()
    rest = _without_globals(global_first(words))
    name = "relaybox"
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else ""
        assert name in command.commands, f"relaybox has no command {name!r}: {shlex.join(words)}"
        command = command.commands[name]
    # A context of its own parses the rest as the command does when it runs.
    command.make_context(name, rest)


@cache
def _whole() -> Any:
    return typer.main.get_command(app)


def _without_globals(words: list[str]) -> list[str]:
    while words and words[0].partition("=")[0] in Group.anywhere:
        words = words[1:] if "=" in words[0] else words[2:]
    return words


def commands_in(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the arguments of each ``relaybox …``: in a code block, or between backquotes."""
    inline = re.finditer(r"`(relaybox [a-z][^`]*)`", text)
    found = [(line_at(text, match.start()), match[1]) for match in inline]
    for number, line in [*found, *_code_lines(text)]:
        if re.match(r"relaybox [a-z]", line):
            words = shlex.split(line.replace("…", "REST"), comments=True)
            ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&", ";")]
            yield number, words[1 : min(ends, default=len(words))]


def _code_lines(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield number, line.removeprefix("    ")
