"""The reference of the Django app has every setting with its default, and every name."""

from __future__ import annotations

import ast
import re

from relaybox.contrib import django as package
from relaybox.contrib.django import conf
from tests.docs.failures import ROOT, checks

PAGE = (ROOT / "docs/reference/django.md").read_text()
CHECKS = (ROOT / "src/relaybox/contrib/django/checks.py").read_text()
CHECK_ID = re.compile(r"relaybox\.[EW]\d{3}")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows, by the quoted name in the first one."""
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in found}


SETTINGS = rows(section("`OUTBOX`"))


def test_every_setting_is_there_in_the_order_of_the_code() -> None:
    assert tuple(SETTINGS) == conf.KEYS


def test_the_default_of_a_setting_is_what_the_code_has() -> None:
    with checks() as check:
        for key in conf.KEYS:
            with check(key):
                written = ast.literal_eval(SETTINGS[key][1].strip("`"))
                name = key.lower() if key == "BACKOFF" else key
                assert getattr(conf.parse({key: written}), name) == getattr(conf.parse({}), name)


def test_every_public_name_and_every_check_is_there() -> None:
    named = section("Names")
    missing = [name for name in package.__all__ if not re.search(rf"`@?{re.escape(name)}\(", named)]
    assert missing == []
    assert list(rows(section("System checks"))) == sorted(set(CHECK_ID.findall(CHECKS)))
