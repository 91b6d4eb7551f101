"""Rows as an operator with a database tool may leave them, or as a newer version writes them."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple
from uuid import uuid4

PAST, FUTURE = "2020-01-01 00:00:00.000000", "2999-12-31 23:59:59.000000"


class Sql(NamedTuple):
    """A value that is written as SQL."""

    text: str


NOT_UTF8 = Sql("CAST(x'ff80' AS TEXT)")
BLOB = Sql("x'00ff'")
LONG = "x" * 5000

# What the three databases take alike, once their constraints are off.
COMMON: dict[str, tuple[Any, ...]] = {
    "payload": ("[]", "5", "null", '"\\ud83d\\ude00"', None),
    "payload_data": (None, b"", b"\xff\x00"),
    "payload_encoding": (None, "binary", "zstd", ""),
    "headers": (
        *("{}", "[]", "5", "null", '"text"', '{"traceparent": 5, "relaybox-replay": []}', '{"tenant": {}}'),
    ),
    "status": ("pending", "delivered", "failed", "discarded", "archived", ""),
    "attempts": (-5, 0, 4, 5, 1000, 2**31 - 1),
    "max_attempts": (-1, 0, 1, 2**31 - 1),
    "crashes": (-1, 0, 1, 7, 2**31 - 1),
    "next_attempt_at": (None, PAST, FUTURE),
    "leased_until": (None, PAST, FUTURE),
    "lease_token": (None, uuid4().hex),
    "lease_owner": (None, "", "somebody"),
    "created_at": (PAST, FUTURE),
    "updated_at": (PAST, FUTURE),
    "last_attempt_at": (None, PAST, FUTURE),
    "delivered_at": (None, PAST, FUTURE),
    "error_message": (None, "", LONG, "line\nline\x1b[31m"),
    "destination": ("nowhere", ""),
    "aggregate_type": ("", "é\n"),
    "aggregate_id": ("", "'; --"),
    "event_type": ("", "newer.kind.v9"),
    "ordering_key": (None, "", "other"),
    "idempotency_key": ("",),
    "event_id": (uuid4().hex,),
}

# Of SQLite, which takes anything anywhere.
ANYTHING = ("", "garbage", 5, -1.5, BLOB, NOT_UTF8, LONG, 2**63 - 1)
SQLITE: dict[str, tuple[Any, ...]] = {
    **{name: (*given, *ANYTHING) for name, given in COMMON.items()},
    "payload": ("{", "garbage", *ANYTHING, None),
    "headers": ("{", *ANYTHING),
    "created_at": (PAST, "0000-00-00", "2024-13-45 99:99:99", "2024-01-01", *ANYTHING),
    "next_attempt_at": (None, PAST, "0000-00-00", *ANYTHING),
    "id": (str(uuid4()), uuid4().hex.upper(), *ANYTHING),
    "event_id": (str(uuid4()), *ANYTHING),
    "position": (0, -1, 2**62, *ANYTHING),
}

TIMES = ("next_attempt_at", "leased_until", "created_at", "updated_at", "delivered_at", "last_attempt_at")
POSTGRESQL: dict[str, tuple[Any, ...]] = {
    **COMMON,
    **{name: (*COMMON[name], "infinity", "-infinity", "0044-03-15 BC", "294276-12-31") for name in TIMES},
}
MARIADB: dict[str, tuple[Any, ...]] = {
    **COMMON,
    **{name: (*COMMON[name], "0000-00-00 00:00:00", "2024-00-00 00:00:00") for name in TIMES},
    "payload": (*COMMON["payload"], "{", "garbage", ""),
    "headers": (*COMMON["headers"], "{", "garbage", ""),
    "id": (str(uuid4())[:32], "garbage", "", uuid4().hex.upper()),
    "event_id": ("garbage", ""),
}


def unique(value: Any, number: int) -> Any:
    """Return a value of the same kind that no other row has."""
    if isinstance(value, Sql):
        return Sql(value.text.replace("x'", f"x'{number:04x}"))
    return f"{number:06d}{value[6:]}" if isinstance(value, str) else value - number


def edit(r: Random, table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """New values for some columns of a row."""
    names = r.sample(list(table), r.choice((1, 1, 1, 2, 3)))
    return {name: r.choice(table[name]) for name in names}
