"""``docs/performance.md``, made of one run of the benchmarks, and the line of it that is kept."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.findings import Facts, Options
from benchmarks.harness import report
from tests.commit import ROOT, commit
from tests.proof.page import table

DOCS = ROOT / "docs"
PACKAGES = (
    "relaybox", "psycopg", "asyncpg", "SQLAlchemy", "uvloop", "aiohttp", "txoutbox", "faststream-outbox",
    "pgqueuer", "procrastinate", "django-outbox-pattern",
)  # fmt: skip
HTTP_BAR = 0.8

HEAD = """# Performance

Figures of `make bench`: Relaybox against other outboxes for Python, each installed from the package index and
in the fastest of its documented configurations, and against bare loops of the drivers, which are what the
database allows. Within a measurement the variants take turns within seconds, so that whatever else the
machine does disturbs all of them alike; what is compared is the ratio of neighbours. Figures are medians, in
brackets the quartiles. Payloads have 300 bytes, handlers do nothing but read them, PostgreSQL runs on the
same machine and writes durably.

This page is written by `make bench`; do not edit it. All figures of every run stand in `performance.jsonl`.
"""
TITLES = {
    "drain": "Drain",
    "relays": "Several relays",
    "latency": "Latency",
    "steady": "A steady load",
    "emit": "Emit",
    "http": "HTTP",
    "memory": "Memory",
    "growth": "Growth of the table",
    "idle": "An idle relay",
    "claim": "Claims",
    "store": "The store against its own statements",
    "django": "Django",
}


def bars(parts: Mapping[str, Facts]) -> list[Facts]:
    """Every bar that these parts are held to, with what was measured."""
    every = [bar for facts in parts.values() for bar in facts.get("bars", ())]
    if http := parts.get("http"):
        loop = "uvloop" if "uvloop" in http else "asyncio"
        ratio = http[loop]["ratio"]
        every.append(
            {
                "bar": f"HTTP, {http['at_once']} in flight, on {loop}",
                "wanted": f"≥ {HTTP_BAR} × the bare loop of the same client",
                "measured": f"{ratio:.2f}",
                "reached": ratio >= HTTP_BAR,
            }
        )
    return every


def show_bars(parts: Mapping[str, Facts]) -> None:
    """Print them."""
    found = bars(parts)
    if found:
        columns = ["bar", "wanted", "measured", "reached"]
        report("bar by bar", columns, _lines(found), {"reached": [bar["reached"] for bar in found]})


def record(parts: Mapping[str, Facts], options: Options, postgres: str, docs: Path = DOCS) -> Facts:
    """A run with all that is needed to compare it with another; kept as a line of ``performance.jsonl``."""
    run = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": _machine(),
        "versions": {"Python": platform.python_version(), "PostgreSQL": postgres, **_versions()},
        "options": {"rows": options.rows, "rounds": options.rounds, "quick": options.quick},
        "parts": parts,
    }
    with (docs / "performance.jsonl").open("a") as file:
        file.write(json.dumps(run) + "\n")
    return run


def write(run: Facts, docs: Path = DOCS) -> None:
    """Write the page and its pictures anew."""
    drawn = plots.draw(run["parts"], docs / "images")
    sections = [HEAD, _about(run), _judged(run), _better(run["parts"])]
    sections += [_part(name, facts, drawn.get(name, [])) for name, facts in run["parts"].items()]
    sections.append(_runs(docs / "performance.jsonl"))
    (docs / "performance.md").write_text("\n\n".join(section.strip() for section in sections) + "\n")


def _machine() -> dict[str, str]:
    processor = _line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = int((_line_of("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def _line_of(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _about(run: Facts) -> str:
    options = run["options"]
    facts = {"date": run["date"], "commit": f"`{run['commit']}`", **run["machine"], **run["versions"]}
    facts["size"] = f"{options['rows']:,} rows, {options['rounds']} rounds" + ", quick" * options["quick"]
    took = sum(part["took"] for part in run["parts"].values())
    facts["took"] = f"{took / 60:.0f} minutes"
    return f"## The run\n\n{table(['', ''], list(facts.items()))}"


def _lines(found: Sequence[Facts]) -> list[list[str]]:
    return [
        [bar["bar"], bar["wanted"], bar["measured"], "yes" if bar["reached"] else "not reached"]
        for bar in found
    ]


def _judged(run: Facts) -> str:
    found = bars(run["parts"])
    missed = sum(not bar["reached"] for bar in found)
    text = f"{len(found) - missed} of {len(found)} bars were reached in this run."
    return f"## Bar by bar\n\n{text}\n\n{table(['bar', 'wanted', 'measured', 'reached'], _lines(found))}"


def _better(parts: Mapping[str, Facts]) -> str:
    """Said whether or not a bar was missed by it."""
    lines = [*_faster_drains(parts), *_shorter_waits(parts)]
    text = "\n".join(f"- {line}" for line in lines) or "Nowhere in this run."
    return f"## Where a peer is better\n\n{text}"


def _faster_drains(parts: Mapping[str, Facts]) -> Iterator[str]:
    figures = parts.get("drain", {}).get("figures", {})
    medians = {name: value["median"] for name, value in figures.items()}
    for name, rate in medians.items():
        peer, _, kind = name.partition(", ")
        own = next((m for m in medians if m.startswith("relaybox, ") and kind.startswith(m[10:])), None)
        if own and peer != "relaybox" and not peer.startswith("bare loop") and rate > medians[own]:
            yield f"drain, {kind}: {peer} with {rate:,.0f} events/s, Relaybox {medians[own]:,.0f}"


def _shorter_waits(parts: Mapping[str, Facts]) -> Iterator[str]:
    figures = parts.get("latency", {}).get("figures", {})
    for name, value in figures.items():
        peer, rate, title = name.rsplit(", ", 2)
        ours = figures[f"relaybox, {rate}, {title}"]["median"]
        if not peer.startswith("relaybox") and value["median"] < ours:
            yield f"latency {title} at {rate}: {peer} with {value['median']:.1f} ms, Relaybox {ours:.1f} ms"


def _part(name: str, facts: Facts, pictures: Sequence[str]) -> str:
    texts = [f"## {TITLES[name]}"]
    for picture in pictures:
        texts.append(f"![{TITLES[name]}](images/{picture}.png)\n\n[As SVG](images/{picture}.svg)")
    for one in facts.get("tables", ()):
        texts.append(f"**{one['title']}**\n\n{table(one['columns'], one['rows'])}".strip())
    if name == "http":
        texts.append(_http(facts))
    return "\n\n".join(texts)


def _http(facts: Facts) -> str:
    loops = {loop: value for loop, value in facts.items() if isinstance(value, dict)}
    rows: list[list[Any]] = [
        [
            loop, f"{value['relay']:,.0f}", f"{value['bare']:,.0f}", f"{value['ratio']:.2f}",
            f"{value['cpu_ratio']:.2f}",
        ]
        for loop, value in loops.items()
    ]  # fmt: skip
    title = f"**{facts['rows']:,} rows, {facts['at_once']} at once, requests/s**"
    return f"{title}\n\n{table(['loop', 'relay', 'bare loop', 'ratio', 'ratio of CPU'], rows)}".strip()


def _runs(file: Path) -> str:
    rows = []
    for line in file.read_text().splitlines():
        run = json.loads(line)
        found = bars(run["parts"])
        reached = sum(bar["reached"] for bar in found)
        kept = run["parts"].get("drain", {}).get("figures", {}).get("relaybox, unordered, kept")
        drained = f"{kept['median']:,.0f}" if kept else "–"
        parts = len(run["parts"])
        rows.append([run["date"], f"`{run['commit']}`", parts, f"{reached} of {len(found)}", drained])
    names = ["date", "commit", "parts", "bars reached", "drain, unordered, kept, events/s"]
    return f"## Runs\n\n{table(names, rows)}"
