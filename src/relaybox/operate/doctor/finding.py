"""The result of an examination: findings, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["error", "warning", "info"]
"""``error``: events are not delivered, or will not be. ``warning``: they are, but worse than they could be.
``info``: worth knowing, and perhaps meant so."""

LEVELS: tuple[Level, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong: what was seen, and the command, the SQL or the words that fix it."""

    level: Level
    title: str
    detail: str
    fix: str
    check: str = ""
    """The name of the check that found it."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """What a check could not look at, and why; it may be right or wrong."""

    reason: str
    check: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the checks found, the worst first."""

    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]
    checks: tuple[str, ...]

    @property
    def sick(self) -> bool:
        """True if there is an error among the findings."""
        return any(finding.level == "error" for finding in self.findings)


def report(results: Iterable[Finding | Unseen], checks: Iterable[str]) -> Report:
    """Return the report of these results, the worst first."""
    every = list(results)
    findings = [one for one in every if isinstance(one, Finding)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    unseen = [one for one in every if isinstance(one, Unseen)]
    return Report(tuple(findings), tuple(unseen), tuple(checks))
