"""What the admin's page of one delivery is made of."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from relaybox.admin import Admin
from relaybox.contrib.django.admin_actions import ACTIONS
from relaybox.ledger import Attempt, Content, Entry, Filter
from relaybox.why import Reason

SIBLINGS = 50
"""How many other deliveries of the event are named."""


@dataclass(frozen=True, slots=True)
class Detailed:
    """A delivery, why it is where it is, what can be done about it, and where else its event goes."""

    entry: Entry
    content: Content
    attempts: tuple[Attempt, ...]
    reason: Reason
    offered: tuple[str, ...]
    siblings: tuple[Entry, ...]


async def look(admin: Admin, id_: UUID) -> Detailed | None:
    """The delivery of that id; None where there is no such, or it goes at this moment."""
    own = next((detail for detail in await admin.event(id_) if detail.entry.id == id_), None)
    reason = next((reason for reason in await admin.why(id_) if reason.entry.id == id_), None)
    if own is None or own.content is None or reason is None:
        return None
    asked = {name: await action.ask(admin, [id_], dry_run=True) for name, action in ACTIONS.items()}
    page = await admin.events(Filter(event_id=own.entry.event_id), limit=SIBLINGS + 1)
    return Detailed(
        own.entry,
        own.content,
        own.attempts,
        reason,
        tuple(name for name, done in asked.items() if done.affected),
        tuple(entry for entry in page.entries if entry.id != id_),
    )
