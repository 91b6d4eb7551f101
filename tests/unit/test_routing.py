"""Which destinations take an event."""

import pytest

from relaybox.core.routing import UNROUTED, Routes, resolve
from relaybox.core.settings import Route
from relaybox.errors import InvalidField, UnknownDestination, Unrouted

ROUTES = Routes(
    [Route("order.*", to="billing"), Route(["file.*", "document.created"], to=["runner", "search"])]
)
KNOWN = ("billing", "runner", "search")


def takes(pattern: str, event_type: str) -> bool:
    return Routes([Route(pattern, to="there")]).destinations(event_type) == ("there",)


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("order.paid", "order.paid", "order.paid.late preorder.paid order-paid"),
        ("order.*", "order.paid order.line.added order.", "orders.paid order Order.paid"),
        ("order.p?id", "", "order.paid"),
        ("order.[p]aid", "", "order.paid"),
        ("*", "anything.at.all", ""),
        ("*.created", "document.created document.created.v2", ""),
        ("a*b*c", "a-b-c", ""),
        ("document.*", "document.created.v2", ""),
        ("document.created.v*", "document.created.v2", ""),
        (
            "document.created",
            "document.created.v2 document.created.v10",
            "document.created.v2x document.created.v",
        ),
        (
            "document.created.v2",
            "document.created.v2",
            "document.created document.created.v1 document.created.v22",
        ),
    ],
)
def test_a_pattern_takes_some_types_and_leaves_others(pattern: str, taken: str, left: str) -> None:
    assert [one for one in taken.split() if not takes(pattern, one)] == []
    assert [one for one in left.split() if takes(pattern, one)] == []
    assert not takes("order.paid", "order.paid\n")


def test_destinations_come_in_order_each_once_from_any_iterable_and_memory_is_bounded() -> None:
    routes = Routes([Route("order.*", to=["b", "a"]), Route("*", to=["a", "c"]), Route("order.paid", to="b")])
    assert routes.destinations("order.paid") == ("b", "a", "c")
    assert routes.destinations("file.added") == ("a", "c")
    routes = Routes(route for route in [Route("a", to="x")])
    assert routes.destinations("a") == ("x",)
    assert routes.patterns == ("a",)
    for number in range(10_000):
        assert ROUTES.destinations(f"order.{number}") == ("billing",)
    assert ROUTES._find.cache_info().currsize <= 4096  # type: ignore[attr-defined]


def test_an_event_goes_where_the_caller_or_its_routes_say_or_waits_for_one() -> None:
    assert resolve("order.paid", None, ROUTES, KNOWN) == ("billing",)
    assert resolve("document.created.v2", None, ROUTES, KNOWN) == ("runner", "search")
    assert resolve("order.paid", ["search", "runner", "search"], ROUTES, KNOWN) == ("search", "runner")
    assert resolve("no.route", "runner", ROUTES, KNOWN) == ("runner",)
    assert resolve("no.route", None, ROUTES, KNOWN, "store") == (UNROUTED,)
    assert resolve("order.paid", None, ROUTES, KNOWN, "store") == ("billing",)


def test_a_destination_nobody_configured_and_an_empty_list_are_refused() -> None:
    with pytest.raises(UnknownDestination, match="'runer'; did you mean 'runner'"):
        resolve("order.paid", ["billing", "runer"], ROUTES, KNOWN)
    with pytest.raises(InvalidField, match="name at least one"):
        resolve("order.paid", [], ROUTES, KNOWN)


def test_an_event_without_a_route_is_refused_with_the_patterns_and_the_fix() -> None:
    with pytest.raises(Unrouted) as caught:
        resolve("ordr.paid", None, ROUTES, KNOWN)
    message = str(caught.value)
    assert "'ordr.paid'" in message
    assert "did you mean 'order.*'?" in message
    assert "order.*, file.*, document.created" in message
    assert "add Route('ordr.paid'" in message
    assert 'unrouted = "store"' in message


def test_a_long_list_of_patterns_is_cut_in_the_message_and_an_empty_one_is_said() -> None:
    with pytest.raises(Unrouted, match=r"p19, …; add"):
        resolve("zzz", None, Routes([Route([f"p{number}" for number in range(500)], to="a")]), ["a"])
    with pytest.raises(Unrouted, match="there are no routes"):
        resolve("order.paid", None, Routes([]), [])
