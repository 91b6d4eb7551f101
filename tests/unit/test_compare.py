"""When a document of the database and one of the index are the same."""

from __future__ import annotations

from typing import Any

import pytest

from relaybox.indexing.compare import HashedIds, differing, version_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": -0.0}, {"a": 0}),
        ({"a": {"x": [1, {"y": 2.0}]}}, {"a": {"x": [1.0, {"y": 2}]}}),
        ({"a": 10**20}, {"a": 1e20}),
        ({"a": 2**63 - 1}, {"a": float(2**63)}),
        ({"a": 2**53 + 1}, {"a": 2**53}),
        ({"a": 2**53}, {"a": float(2**53)}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_documents_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert version_of(one) == version_of(other)
    assert differing(one, other) == ()


@pytest.mark.parametrize(
    ("one", "other", "fields"),
    [
        ({"a": 1}, {"a": "1"}, ("a",)),
        ({"a": 1}, {"a": True}, ("a",)),
        ({"a": 0}, {"a": False}, ("a",)),
        ({"a": None}, {}, ("a",)),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a",)),
        ({"a": 1.5}, {"a": 1}, ("a",)),
        ({"a": "é"}, {"a": "e\u0301"}, ("a",)),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}, ("b", "c", "d")),
        ({"a": 2**53 + 4}, {"a": 2**53}, ("a",)),
        ({"a": 10**400}, {"a": 10**401}, ("a",)),
    ],
)
def test_documents_differ_in_their_fields(
    one: dict[str, Any], other: dict[str, Any], fields: tuple[str, ...]
) -> None:
    assert version_of(one) != version_of(other)
    assert differing(one, other) == fields


def test_hashed_ids_hold_what_was_added_and_nothing_else() -> None:
    ids = HashedIds(part=64)
    for number in range(1_000):
        ids.add(f"document-{number}")

    assert all(f"document-{number}" in ids for number in range(1_000))
    assert not any(f"document-{number}" in ids for number in range(1_000, 2_000))
