"""Compares the index with the database, document by document."""

import sqlalchemy as sa
from database import Document
from pydantic import BaseModel
from search import Down

from relaybox import Outbox
from relaybox.core.outcome import Unavailable
from relaybox.search import Source, areconcile

documents = Source(sa.select(Document))
"""What the index is to hold; ``relaybox backfill``, ``reconcile`` and ``reindex`` take it as well."""


class Comparison(BaseModel):
    """How far they are the same; ``text`` says it for people."""

    documents: int
    consistency: float
    differences: int
    waiting: int
    text: str


async def compare(outbox: Outbox) -> Comparison:
    """Look at every document on both sides. What is on its way to the index does not count."""
    try:
        seen = await areconcile(outbox, "search", documents)
    except Unavailable as error:
        raise Down(str(error)) from None
    text = f"{seen.consistency:g} % the same ({seen.documents} in the database)"
    if seen.differences:
        text += f": {seen.missing} missing, {seen.stale} old, {seen.orphaned} too many in the index"
    if seen.in_flight:
        text += f", {seen.in_flight} on the way"
    return Comparison(
        documents=seen.documents,
        consistency=seen.consistency,
        differences=seen.differences,
        waiting=seen.in_flight,
        text=text,
    )
