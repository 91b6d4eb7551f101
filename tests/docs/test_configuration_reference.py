"""The reference of the configuration has every sink."""

from __future__ import annotations

import re

from relaybox.core.schemes import SCHEMES
from tests.docs.failures import ROOT

PAGE = (ROOT / "docs/reference/configuration.md").read_text()


def test_the_table_of_sinks_has_every_scheme_and_no_other() -> None:
    table = PAGE.partition("### Sinks\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert set(re.findall(r"`([a-z]+):", " ".join(listed))) == SCHEMES
