"""Looks at a set-up from outside and says what is wrong with it, and what mends that."""

from __future__ import annotations

from relaybox.doctor.examination import CHECKS, Check, examine
from relaybox.doctor.finding import Finding, Level, Report, Unseen

__all__ = ["CHECKS", "Check", "Finding", "Level", "Report", "Unseen", "examine"]
