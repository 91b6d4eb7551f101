"""The reference of the Django app has every setting with its default, and every name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from relaybox.contrib import django as package
from relaybox.contrib.django import conf

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/django.md").read_text()
CHECKS = (ROOT / "src/relaybox/contrib/django/checks.py").read_text()
CHECK_ID = re.compile(r"relaybox\.[EW]\d{3}")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a table's rows, by what the first has in quotes."""
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in found}


SETTINGS = rows(section("`OUTBOX`"))


def test_every_setting_is_there_in_the_order_of_the_code() -> None:
    assert tuple(SETTINGS) == conf.KEYS


@pytest.mark.parametrize("key", conf.KEYS)
def test_the_default_of_a_setting_is_what_the_code_has(key: str) -> None:
    written = ast.literal_eval(SETTINGS[key][1].strip("`"))
    by_default, as_written = conf.parse({}), conf.parse({key: written})
    if key == "BACKOFF":
        assert as_written.backoff == by_default.backoff
    else:
        assert getattr(as_written, key) == getattr(by_default, key)


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert f"`{name}(" in section("Names") or f"`@{name}(" in section("Names")


def test_every_check_is_there() -> None:
    assert list(rows(section("System checks"))) == sorted(set(CHECK_ID.findall(CHECKS)))
