"""Each incident runs on the product and on variants that are broken on purpose: one check judges both."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest

from relaybox.errors import RelayboxError

PRODUCT = "the product"
IN_VAIN = 1.5
"""Seconds to wait for what a broken variant will not do."""


def variants(*broken: str) -> pytest.MarkDecorator:
    """Run the test on the product, ``broken=None``, and on what is broken in each of these ways."""
    return pytest.mark.parametrize("broken", [None, *broken], ids=[PRODUCT, *broken])


@contextmanager
def check(broken: str | None, finding: str) -> Iterator[None]:
    """What the product must pass, and a broken variant must not: it is caught with this very finding."""
    if broken is None:
        yield
        return
    with pytest.raises((AssertionError, RelayboxError), match=re.escape(finding)):
        yield


def rewrite(monkeypatch: pytest.MonkeyPatch, texts: Any, name: str, *changes: tuple[str, str]) -> None:
    """Change the text of a statement, or of a word that statements have in common."""
    assert isinstance(texts, MutableMapping)
    text = texts[name]
    for old, new in changes:
        assert old in text, f"{name} no longer says {old!r}"
        text = text.replace(old, new)
    monkeypatch.setitem(texts, name, text)
