"""Whatever is given to ``emit``: rows that hold exactly that, or a typed error."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from relaybox.database.dialects import MARIADB, POSTGRESQL, SQLITE, Dialect
from relaybox.database.statements.delivery import INSERTED
from relaybox.emit.row import Emission, RowBuilder
from relaybox.errors import EmitError, InvalidField, PayloadError, UnknownDestination
from relaybox.wire.codec import decode
from tests.properties import calls
from tests.properties.calls import LONGEST, Drawn
from tests.properties.conftest import Feed
from tests.properties.values import REFUSED, depth, same
from tests.properties.volume import attempt, each

BUILDER = RowBuilder(calls.settings("sqlite://"))


def test_a_call_becomes_rows_that_hold_what_was_given_or_a_typed_error(feed: Feed) -> None:
    feed("emit", each(build), size=100)


def build(r: Random) -> None:
    """Build the rows of one call and hold them against it."""
    dialect = r.choice((POSTGRESQL, SQLITE, MARIADB))
    drawn = calls.call(r)
    emission, error = attempt(lambda: BUILDER.build(drawn.call, dialect), EmitError)
    if error is None:
        assert not drawn.refused, "what must be refused was taken"
        check(emission, drawn)
    else:
        assert drawn.refused or too_much(error, drawn, dialect), error
        assert isinstance(error, InvalidField | PayloadError | UnknownDestination)
        assert len(str(error)) < 2_000


def too_much(error: EmitError, drawn: Drawn, dialect: Dialect) -> bool:
    """True if it was refused for its size or its depth, and is that large or deep."""
    if not isinstance(error, PayloadError):
        return False
    plain = drawn.headers if error.path.startswith("headers") else drawn.payload
    if plain is REFUSED or isinstance(plain, bytes):
        return False
    if "nested" in str(error):
        # Python's stack may end before the database does.
        return depth(plain) > min(dialect.limits.max_depth, 350)
    # Two writers of JSON write some numbers in different lengths.
    return len(json.dumps(plain, ensure_ascii=False).encode()) > 0.9 * LONGEST


def check(emission: Emission, drawn: Drawn) -> None:
    for values in emission.rows:
        row: dict[str, Any] = dict(zip(INSERTED, values, strict=True))
        stored = decode(row["payload"], row["payload_data"], row["payload_encoding"])
        assert same(stored, drawn.payload)
        assert same(decode(row["headers"], None, None), drawn.headers)
        if row["payload"] is not None:
            assert same(json.loads(row["payload"]), drawn.payload)
            assert len(row["payload"].encode()) <= LONGEST
        for name, longest in (("aggregate_type", 100), ("aggregate_id", 255), ("event_type", 100)):
            assert isinstance(row[name], str)
            assert 1 <= len(row[name]) <= longest
        assert row["ordering_key"] is None or len(row["ordering_key"]) <= 255
        assert 1 <= row["max_attempts"] < 2**31
    assert len(emission.rows) == len(emission.destinations) == len(set(emission.destinations))
