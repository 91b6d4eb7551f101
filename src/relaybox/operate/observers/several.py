"""One observer made of several."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from relaybox.relay.observer import Observer

log = logging.getLogger("relaybox.relay")


class Observers(Observer):
    """Passes every call to each observer. An observer that raises is logged and does not affect the relay."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        timing = [observer for observer in observers if observer.timed]
        self.timed = bool(timing)
        for name, _ in inspect.getmembers(Observer, inspect.isfunction):
            setattr(self, name, partial(_tell, timing if name == "sent" else observers, name))


def _tell(observers: Sequence[Observer], name: str, *given: Any) -> None:
    for observer in observers:
        try:
            getattr(observer, name)(*given)
        except Exception:
            log.exception("the observer %s failed", type(observer).__name__)
