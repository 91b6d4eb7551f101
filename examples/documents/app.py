"""The document service: write documents, and find them in a search engine that is kept in step."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import sqlalchemy as sa
from compare import Comparison, compare
from database import DATABASE, Document, Sessions, create_tables, engine, now
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from search import NAME, Down, Hit, ping, search
from sqlalchemy.ext.asyncio import AsyncSession
from state import Engine, Sync, engine_state, syncs, why_text

from relaybox import Destination, Outbox, Route
from relaybox.operate.admin import Admin

STATIC = Path(__file__).parent / "static"
LATEST = 100

outbox = Outbox(
    DATABASE,
    destinations=[
        Destination(
            "search",
            os.environ["SEARCH_URL"],  # opensearch://…, meilisearch://… or algolia://…
            auth="env:SEARCH_KEY" if os.environ.get("SEARCH_KEY") else None,
            options={"create_index": True},
            # Each event has the whole document: the next edit fixes what the engine refused of the last one.
            on_failed="skip",
            # Shorter than in life, so that one can watch.
            timeout="5s",
            lease="10s",
            backoff={"base": "250ms", "cap": "2s"},
        )
    ],
    routes=[Route("document.*", to="search")],
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The relay runs inside the application, and ends with it."""
    await create_tables()
    await outbox.amigrate()
    async with outbox.relay(), outbox.admin("documents") as app.state.admin:
        yield
    await engine.dispose()


async def transaction() -> AsyncIterator[AsyncSession]:
    """Yield a session that commits when the function returns, and rolls back when it raises."""
    async with Sessions.begin() as session:
        yield session


def admin_of(request: Request) -> Admin:
    """The operators' service of the outbox."""
    return request.app.state.admin


app = FastAPI(title="Documents", lifespan=lifespan)
app.mount("/static", StaticFiles(directory=STATIC), name="static")

# Without the scope, FastAPI would commit after it has answered: too late to say that it failed.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
Operator = Annotated[Admin, Depends(admin_of)]


class New(BaseModel):
    """What people write."""

    model_config = ConfigDict(str_strip_whitespace=True)
    title: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")
    body: str = Field("", max_length=20_000, pattern=r"^[^\x00]*$")


class Edit(New):
    """The same, of a document that they saw at a version."""

    version: int


class Saved(BaseModel):
    """A document; what the search engine gets, too."""

    model_config = ConfigDict(from_attributes=True)
    id: UUID
    title: str
    body: str
    version: int
    updated_at: datetime


class Shown(Saved):
    """A document, and whether a search finds it as it is."""

    sync: Sync


@app.post("/documents", status_code=201)
async def create(new: New, session: Transaction) -> Saved:
    """Save a document."""
    document = Document(**new.model_dump())
    session.add(document)
    await session.flush()
    return await announce(session, "document.created", document)


@app.put("/documents/{document_id}")
async def edit(document_id: UUID, new: Edit, session: Transaction) -> Saved:
    """Change a document, unless somebody else has done so meanwhile."""
    document = await locked(session, document_id, new.version)
    document.title, document.body = new.title, new.body
    document.version, document.updated_at = document.version + 1, now()
    return await announce(session, "document.updated", document)


@app.delete("/documents/{document_id}", status_code=204)
async def delete(document_id: UUID, version: int, session: Transaction) -> None:
    """Delete a document, unless somebody has changed it meanwhile."""
    document = await locked(session, document_id, version)
    await session.delete(document)
    await announce(session, "document.deleted", document)


async def announce(session: AsyncSession, event: str, document: Document) -> Saved:
    """Emit the change in the transaction that makes it: the index hears of it, or nothing has happened."""
    saved = Saved.model_validate(document)
    await outbox.aemit(session, "Document", document.id, event, saved)
    return saved


async def locked(session: AsyncSession, document_id: UUID, version: int) -> Document:
    """Lock the document for this transaction. Of two who change it, the second waits and gets an error."""
    document = await session.get(Document, document_id, with_for_update=True)
    if document is None:
        raise HTTPException(404, "This document is gone: somebody has deleted it.")
    if document.version != version:
        raise HTTPException(409, "Somebody has changed this document meanwhile. Look at it, and try again.")
    return document


@app.get("/documents")
async def documents(session: Transaction) -> list[Shown]:
    """The latest documents, and where each is on its way to the index."""
    found = list(
        await session.scalars(sa.select(Document).order_by(Document.updated_at.desc()).limit(LATEST))
    )
    states = await syncs(session, outbox.tables, [document.id for document in found])
    return [
        Shown(**Saved.model_validate(document).model_dump(), sync=states.get(str(document.id), Sync()))
        for document in found
    ]


@app.get("/documents/{document_id}/why")
async def why(document_id: UUID, session: Transaction, admin: Operator) -> dict[str, str]:
    """Why the index has the latest change of a document, or has it not."""
    sync = (await syncs(session, outbox.tables, [document_id])).get(str(document_id))
    if sync is None:
        raise HTTPException(404, "Nothing was ever sent of this document.")
    return {"state": sync.state, "why": await why_text(admin, sync.delivery)}


@app.post("/documents/{document_id}/retry", status_code=202)
async def retry(document_id: UUID, session: Transaction, admin: Operator) -> None:
    """Send once more what the engine refused."""
    sync = (await syncs(session, outbox.tables, [document_id])).get(str(document_id), Sync())
    if sync.state == "failed":
        await admin.retry([sync.delivery])
        outbox.wake("search")


@app.get("/search")
async def find(q: Annotated[str, Query(max_length=200)]) -> list[Hit]:
    """Return what the engine finds."""
    return await search(q.strip()) if q.strip() else []


@app.get("/engine")
async def engine_now(admin: Operator) -> Engine:
    """Return whether the engine answers, and how many changes wait for it."""
    try:
        await ping()
    except Down as error:
        return await engine_state(admin, NAME, str(error))
    return await engine_state(admin, NAME, None)


@app.post("/engine/resume", status_code=202)
async def resume(admin: Operator) -> None:
    """Try again at once, instead of when the circuit's pause is over."""
    await admin.resume("search")
    outbox.wake("search")


@app.post("/compare")
async def compared() -> Comparison:
    """Compare the index with the database, document by document."""
    return await compare(outbox)


@app.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """All of it, to use."""
    return FileResponse(STATIC / "page.html")


@app.exception_handler(Down)
async def down(request: Request, error: Down) -> JSONResponse:
    """Documents can be written while the engine is away, but not found."""
    return JSONResponse(
        {"detail": f"{error}. Your documents are safe, and can be found when it is back."}, 503
    )


@app.exception_handler(RequestValidationError)
async def refused(request: Request, error: RequestValidationError) -> JSONResponse:
    """The first thing that is wrong, in a sentence."""
    first: Any = error.errors()[0]
    match first["type"]:
        case "missing" | "string_too_short":
            said = "is missing"
        case "string_too_long":
            said = f"is too long: {first['ctx']['max_length']:,} characters are the most"
        case "string_pattern_mismatch":
            said = "holds a character that cannot be stored"
        case _:
            said = f"cannot be used: {first['msg']}"
    return JSONResponse({"detail": f"The {first['loc'][-1]} {said}."}, 422)
