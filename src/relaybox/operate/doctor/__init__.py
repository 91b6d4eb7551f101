"""Finds what is wrong with a set-up, and says what fixes it.

A check is a function with the decorator ``check``, in the module about what it looks at. Its name is the
function's. List a new one in ``examination.CHECKS``, which says the order, in the help of ``relaybox doctor``
and in ``docs/how-to/doctor.md``.
"""

from __future__ import annotations

from relaybox.operate.doctor.check import Check, Finding, Level, Report, Unseen
from relaybox.operate.doctor.examination import CHECKS, examine

__all__ = ["CHECKS", "Check", "Finding", "Level", "Report", "Unseen", "examine"]
