"""The page of incidents and the tests tell of the same ones."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/explanation/incidents.md"


def test_every_incident_stands_on_the_page_and_has_its_test() -> None:
    documented = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text()))
    tests = {
        (path.name, name)
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert documented == tests
