"""What Algolia answers, where it is Algolia that answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from relaybox.core.outcome import Unavailable
from relaybox.search.http import Reply

_OF_INDEX = re.compile(r"index ?name", re.IGNORECASE)


def object_of(reply: Reply) -> Mapping[str, Any]:
    """The JSON object of an answer; raises ``Unavailable`` where it is none."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise Unavailable(f"{reply.where} answered in another way than Algolia does")
    return answer


def task_of(reply: Reply) -> int:
    """The number of the task that a request made."""
    task = object_of(reply).get("taskID")
    if not isinstance(task, int):
        raise Unavailable(f"{reply.where} answered {reply.status} without a task: is it Algolia?")
    return task


def is_of_record(reply: Reply) -> bool:
    """Whether it says of the records what is wrong, and not of the index; somebody else says nothing."""
    said = said_in(reply)
    return reply.status == 413 or (bool(said) and not _OF_INDEX.search(said))


def said_in(reply: Reply) -> str:
    """What Algolia says is wrong."""
    return str(error_in(reply).get("message", ""))


def over_quota(reply: Reply) -> bool:
    """Whether the application has no room left."""
    return reply.status in (402, 403) and "quota" in said_in(reply).lower()


def error_in(reply: Reply) -> Mapping[str, Any]:
    """All that it says of a failure; nothing where somebody else answered."""
    try:
        said = reply.json()
    except Unavailable:
        return {}
    return said if isinstance(said, dict) else {}
