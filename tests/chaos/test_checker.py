"""The checker finds what it is there to find: each rule, in a history made by hand."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.chaos.checker import Answer, Change, Disorder, Row, prove

START = datetime(2026, 1, 1)


class Story:
    """A history in the making: two rows, ``a`` before ``b``, of one key."""

    def __init__(self) -> None:
        self._rows = {"a": Row("a", "key", 1, 0, "pending"), "b": Row("b", "key", 2, 1, "pending")}
        blank = Change._make([0, 0, "", None, "pending", "pending", *[None] * 7, 0, 0, 0, 0])
        self._now = {id_: blank._replace(id=id_) for id_ in self._rows}
        self._changes: list[Change] = []
        self._answers: list[Answer] = []

    def claim(self, ids: str, by: str, at: float, **other: Any) -> Story:
        """``by`` leases rows for ten seconds."""
        for id_ in ids:
            now = self._now[id_]
            died = now.token is not None
            self._change(
                id_,
                connection=ord(by),
                owner=by,
                token=f"{by}{at}",
                claimed_at=START + timedelta(seconds=at),
                leased_until=START + timedelta(seconds=at + 10),
                **{"attempts": now.attempts + (not died), "crashes": now.crashes + died} | other,
            )
        return self

    def settle(self, id_: str, status: str = "delivered", *, by: str | None = None, **other: Any) -> Story:
        """The holder of a row, or ``by``, ends its lease."""
        now = self._now[id_]
        owner, token = now.owner or "", now.token or ""
        connection = ord(by or owner)
        self._change(id_, connection=connection, status=status, token=None, leased_until=None, **other)
        return self.told(owner, token, id_)

    def told(self, owner: str, token: str, id_: str, *, lost: bool = False) -> Story:
        self._answers.append(Answer(owner, token, [id_], [id_] if lost else []))
        return self

    def broken(self) -> set[str]:
        rows = [row._replace(status=self._now[row.id].status) for row in self._rows.values()]
        try:
            prove(rows, self._changes, self._answers, ["delivered", "pending"])
        except Disorder as disorder:
            return {violation.rule for violation in disorder.violations}
        return set()

    def _change(self, id_: str, **new: Any) -> None:
        now = self._now[id_]
        before = {f"old_{name}": getattr(now, name) for name in ("status", "token", "attempts", "crashes")}
        times = {f"old_{name}": getattr(now, name) for name in ("leased_until", "next_attempt_at")}
        change = now._replace(**before, **times, seq=len(self._changes) + 1, **new)
        self._changes.append(change)
        self._now[id_] = change


def later(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


GOOD = {
    "one claim takes both": Story().claim("ab", "A", 1).settle("a").settle("b"),
    "in whatever order they are written": Story().claim("ba", "A", 1).settle("b").settle("a"),
    "one after the other": Story().claim("a", "A", 1).settle("a").claim("b", "B", 2).settle("b"),
    "taken over": Story().claim("a", "A", 1).claim("a", "B", 12).told("A", "A1", "a", lost=True).settle("a"),
    "a zombie keeps what nobody took over": Story().claim("ab", "A", 1).claim("a", "B", 12).settle("b"),
    "released": Story().claim("a", "A", 1).settle("a", "pending", attempts=0).claim("a", "B", 2),
}

BAD = {
    "claimed twice": Story().claim("a", "A", 1).claim("a", "B", 2),
    "claimed early": Story()
    .claim("a", "A", 1)
    .settle("a", "pending", next_attempt_at=later(9))
    .claim("a", "B", 5),
    "out of turn": Story().claim("a", "A", 1).claim("b", "B", 2),
    "changed after its end": Story().claim("a", "A", 1).settle("a").claim("a", "B", 20),
    "settled by another": Story().claim("a", "A", 1).claim("a", "B", 12).settle("a", by="A"),
    "miscounted": Story().claim("a", "A", 1, attempts=2),
    "untrue answer": Story().claim("a", "A", 1).settle("a").told("A", "A1", "a", lost=True),
}

OUT_OF_TURN = {
    "the first is not claimed yet": Story().claim("b", "B", 1).claim("a", "A", 1),
    "the first was left behind": Story().claim("a", "A", 1).claim("b", "B", 12),
    "the first is backing off": Story()
    .claim("a", "A", 1)
    .settle("a", "pending", next_attempt_at=later(9))
    .claim("b", "B", 5),
    "the first was released": Story()
    .claim("a", "A", 1)
    .settle("a", "pending", attempts=0)
    .claim("b", "B", 5),
}


@pytest.mark.parametrize("story", GOOD.values(), ids=GOOD.keys())
def test_a_good_history_passes(story: Story) -> None:
    assert story.broken() == set()


@pytest.mark.parametrize(("rule", "story"), BAD.items(), ids=BAD.keys())
def test_each_broken_rule_is_named(rule: str, story: Story) -> None:
    assert story.broken() == {rule}


@pytest.mark.parametrize("story", OUT_OF_TURN.values(), ids=OUT_OF_TURN.keys())
def test_the_second_may_not_be_claimed_while_the_first_is_open(story: Story) -> None:
    assert story.broken() == {"out of turn"}


def test_a_run_is_not_delivered_past_a_row_that_was_given_back() -> None:
    story = Story().claim("ab", "A", 1).settle("a", "pending", next_attempt_at=later(9)).settle("b")
    assert story.broken() == {"delivered out of order"}


def test_the_end_and_the_order_of_commits_are_judged() -> None:
    rows = [Row("a", "key", 1, 1, "delivered"), Row("b", "key", 2, 0, "pending")]
    with pytest.raises(Disorder, match=r"(?s)not delivered.*not in commit order"):
        prove(rows, [], [], ["delivered"])
