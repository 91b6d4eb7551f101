"""Finds what is wrong with a set-up, and says what fixes it.

A check is a function with the decorator ``check``, in the module about what it looks at. Its name is the
function's, and it runs in the order in which the module defines it. List a new one in the help of
``relaybox doctor`` and in ``docs/how-to/doctor.md``.
"""

from __future__ import annotations

from relaybox.operate.doctor.check import Check
from relaybox.operate.doctor.examination import CHECKS, examine
from relaybox.operate.doctor.finding import Finding, Level, Report, Unseen

__all__ = ["CHECKS", "Check", "Finding", "Level", "Report", "Unseen", "examine"]
