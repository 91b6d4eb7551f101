"""The one list of sinks agrees with the extras that install their packages, and with the sinks themselves."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from relaybox.core.schemes import SEARCH_ENGINES, SINKS, SinkKind

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
KINDS = {**SINKS, **SEARCH_ENGINES}


@pytest.mark.parametrize("scheme", KINDS)
def test_the_extra_of_a_sink_installs_its_package(scheme: str) -> None:
    kind: SinkKind = KINDS[scheme]
    assert bool(kind.package) == bool(kind.extra)
    if not kind.extra:
        return
    required = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in EXTRAS[kind.extra]}
    assert required.intersection(name.lower() for name in packages_distributions()[kind.package])
    assert any(kind.extra in re.split(r"[\[\],]", requirement) for requirement in EXTRAS["all"])


@pytest.mark.parametrize("scheme", KINDS)
def test_the_code_that_opens_a_sink_exists(scheme: str) -> None:
    module, _, name = KINDS[scheme].opens.partition(":")
    assert callable(getattr(import_module(module), name))
