"""No lower bound admits a release with a known vulnerability that it fixed later."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

FIXED = {
    # CVE-2026-69244: the parser of answers reads beyond its buffer.
    "aiohttp": "3.14.3",
    # CVE-2025-65896: SQL in the names of parameters.
    "asyncmy": "0.2.12",
    # GHSA-537c-gmf6-5ccf: OpenSSL in the wheels; CVE-2026-26007, CVE-2026-34073.
    "cryptography": "48.0.1",
    # The last release of 4.2. Later series fix more.
    "django": "4.2.30",
    # CVE-2025-27516: a way out of the sandbox.
    "jinja2": "3.1.6",
    # CVE-2026-48710: `Host` in `request.url`; CVE-2026-54282, CVE-2026-54283, CVE-2025-62727.
    "starlette": "1.3.1",
    # CVE-2023-28859: an answer for another connection.
    "redis": "4.5.4",
    # CVE-2021-23727: commands from the result store.
    "celery": "5.2.2",
}
ASKED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
]


@pytest.mark.parametrize("name", FIXED)
def test_a_lower_bound_is_a_release_without_known_vulnerabilities(name: str) -> None:
    asked = [one for one in ASKED if one.name.lower() == name]
    assert asked
    for requirement in asked:
        [lower] = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        assert lower >= Version(FIXED[name]), requirement
