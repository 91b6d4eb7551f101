"""Gradual rollout of the routes in ``OUTBOX``."""

from __future__ import annotations

from typing import Any

from relaybox.config import Route
from relaybox.contrib.django.configuration import change, get_configuration
from relaybox.rollout import is_sent


def enabled(route: Route | str, aggregate_id: Any) -> bool:
    """Whether what the route takes of this aggregate is really sent, as ``Outbox.enabled`` says."""
    return is_sent(get_configuration().builder.routes, route, aggregate_id)


def rollout(route: Route | str, percent: float) -> None:
    """Take the events of so many percent of the aggregates from now on, in this process."""
    change(route, rollout=percent)


def shadow(route: Route | str, on: bool) -> None:
    """Send what it takes, or store it and send nothing, from now on, in this process."""
    change(route, shadow=on)
