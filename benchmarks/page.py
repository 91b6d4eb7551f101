"""Write ``docs/performance.md`` from one run of the benchmarks, and keep the run as a line of JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import compared, plots
from benchmarks.findings import Facts, Options
from benchmarks.harness import report
from tests.commit import ROOT, commit
from tests.proof.page import table

DOCS = ROOT / "docs"
PACKAGES = (
    "relaybox", "psycopg", "asyncpg", "SQLAlchemy", "uvloop", "aiohttp", "txoutbox", "faststream-outbox",
    "pgqueuer", "procrastinate", "django-outbox-pattern",
)  # fmt: skip
PROFILE = """# Profile before and after

To be written: where the time went before, and where it goes now.
"""

HEAD = """# Performance

Figures of `make bench`: Relaybox against other outboxes for Python (peers) and against bare loops of the
drivers. Each peer is installed from the package index, in the best of its documented configurations. The
bare loops show what the database allows. The variants of a measurement take turns within seconds, so that
other work of the machine disturbs all of them equally. The comparison is the ratio of neighbours. Figures
are medians, with the quartiles in brackets.

- Payloads have 300 bytes, and handlers only read them. PostgreSQL runs on the same machine with the
  settings of a new cluster, fsync included.
- Relays, peers and bare loops run in separate processes, all as `relaybox relay` does: on uvloop, and with
  `gc.freeze()` before the work begins. A peer that is faster on asyncio's loop uses that, and the table
  says so.
- Each peer is tried in several of the configurations that its documentation offers, for its rate and,
  separately, for its latency, with its LISTEN/NOTIFY if it has that. The tables show the chosen
  configuration.
- Relaybox always has its default settings.

`make bench` writes this page; do not edit it. `performance.jsonl` has all figures of every run.
"""
AGAIN = """## How to repeat it

```sh
make bench                          # everything, in about 40 minutes; writes this page
make bench PARTS='drain latency'    # some parts, which are only printed
.venv/bin/python -m benchmarks --help
.venv/bin/python -m benchmarks.compare ../other   # drain and latency against another checkout, in turns
```

It needs Python and Linux, installs the peers into `.venv`, and starts a PostgreSQL of its own. Run nothing
else on the machine at the same time.
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
    "inbox": "The inbox",
    "django": "Django",
    "instrumentation": "Metrics and traces",
    "operate": "Pages, API and metrics",
    "bounds": "Bounds of time",
    "neighbours": "Neighbours in trouble",
    "kills": "Kills",
}


def bars(parts: Mapping[str, Facts]) -> list[Facts]:
    """Return every bar of these parts, with its figure."""
    return [bar for facts in parts.values() for bar in facts["bars"]]


def show_bars(parts: Mapping[str, Facts]) -> None:
    """Print the bars."""
    found = bars(parts)
    if found:
        columns = ["bar", "wanted", "measured", "reached"]
        report("bar by bar", columns, _lines(found), {"reached": [bar["reached"] for bar in found]})


def record(parts: Mapping[str, Facts], options: Options, postgres: str, docs: Path = DOCS) -> Facts:
    """Keep a run as a line of ``performance.jsonl``, with everything needed to compare it with another."""
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
    """Write the page and its pictures again."""
    drawn = plots.draw(run["parts"], docs / "images")
    runs = [json.loads(line) for line in (docs / "performance.jsonl").read_text().splitlines()]
    sections = [HEAD, _about(run), _judged(run), _better(run["parts"])]
    sections += [_part(name, facts, drawn.get(name, [])) for name, facts in run["parts"].items()]
    sections += [compared.two(runs), _profile(docs / "performance-profile.md"), AGAIN, _runs(runs)]
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
    lines = [[*line, bar["limit"]] for line, bar in zip(_lines(found), found, strict=True)]
    columns = ["bar", "wanted", "measured", "reached", "what limits it"]
    return f"## Bar by bar\n\n{text}\n\n{table(columns, lines)}"


def _better(parts: Mapping[str, Facts]) -> str:
    """Return where a peer is better, whether or not that missed a bar."""
    lines = [*_faster_drains(parts), *_shorter_waits(parts)]
    text = "\n".join(f"- {line}" for line in lines) or "In nothing that was measured in this run."
    return f"## Where a peer is better\n\n{text}"


def _faster_drains(parts: Mapping[str, Facts]) -> Iterator[str]:
    figures = parts.get("drain", {}).get("figures", {})
    medians = {name: value["median"] for name, value in figures.items()}
    for name, rate in medians.items():
        peer, _, kind = name.partition(", ")
        if peer == "relaybox" or peer.startswith(("bare loop", "kept")):
            continue
        own = next(m for m in medians if m.startswith("relaybox, ") and kind.startswith(m[10:]))
        if rate > medians[own]:
            yield (
                f"{peer} drains {kind.removesuffix(', tried only')} faster: "
                f"{rate:,.0f} events/s, Relaybox {medians[own]:,.0f}"
            )


def _shorter_waits(parts: Mapping[str, Facts]) -> Iterator[str]:
    figures = parts.get("latency", {}).get("figures", {})
    for name, value in figures.items():
        peer, rate, title = name.rsplit(", ", 2)
        ours = figures[f"relaybox, {rate}, {title}"]["median"]
        if not peer.startswith("relaybox") and value["median"] < ours:
            what = "longest wait" if title == "longest" else f"{title} of the waits"
            yield (
                f"{peer} has the shorter {what} at {rate}: {value['median']:.1f} ms, Relaybox {ours:.1f} ms"
            )


def _profile(file: Path) -> str:
    """Return a link to the page that is written by hand."""
    if not file.exists():
        file.write_text(PROFILE)
    return (
        f"## Profile before and after\n\nWhere the time went and where it goes: [{file.name}]({file.name})."
    )


def _part(name: str, facts: Facts, pictures: Sequence[str]) -> str:
    texts = [f"## {TITLES[name]}"]
    for picture in pictures:
        texts.append(f"![{TITLES[name]}](images/{picture}.png)\n\n[As SVG](images/{picture}.svg)")
    for one in facts.get("tables", ()):
        texts.append(f"**{one['title']}**\n\n{table(one['columns'], one['rows'])}".strip())
    return "\n\n".join(texts)


def _runs(runs: Sequence[Facts]) -> str:
    rows = []
    for run in runs:
        found = bars(run["parts"])
        reached = sum(bar["reached"] for bar in found)
        kept = run["parts"].get("drain", {}).get("figures", {}).get("relaybox, unordered, kept")
        drained = f"{kept['median']:,.0f}" if kept else "–"
        parts = len(run["parts"])
        rows.append([run["date"], f"`{run['commit']}`", parts, f"{reached} of {len(found)}", drained])
    names = ["date", "commit", "parts", "bars reached", "drain, unordered, kept, events/s"]
    return f"## All runs\n\n{table(names, rows)}"
