"""The shop: an API that takes orders, and a page that shows where everything is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path as File
from typing import Annotated

from database import DATABASE, Order, Sessions, create_tables, engine
from fastapi import Depends, FastAPI, HTTPException, Path, Request
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from view import Line, lines, trouble

from relaybox import Destination, Outbox, Route

KAFKA = os.environ["KAFKA"]

outbox = Outbox(
    DATABASE,
    # The topic of an order's events is order-events, unless a path in the URL says otherwise.
    destinations=[Destination("kafka", f"kafka://{KAFKA}", ordered=True, timeout="5s", lease="10s")],
    routes=[Route("order.*", to="kafka")],
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The tables are there before the first request, and the connections end with the last."""
    await create_tables()
    yield
    await engine.dispose()


async def transaction() -> AsyncIterator[AsyncSession]:
    """Yield a session that commits when the function returns, and rolls back when it raises."""
    async with Sessions.begin() as session:
        yield session


app = FastAPI(title="Orders", lifespan=lifespan)
templates = Jinja2Templates(File(__file__).parent)

# Without the scope, FastAPI would commit after it has answered: too late to say that it failed.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
OrderId = Annotated[int, Path(ge=1, lt=2**31)]


class NewOrder(BaseModel):
    """What a customer sends."""

    item: str = Field(max_length=100, pattern=r"^[\w .,'-]+$")
    quantity: int = Field(ge=1, le=1000)


class Placed(NewOrder):
    """What the customer gets back."""

    id: int
    paid: bool


@app.post("/orders", status_code=201)
async def place(new: NewOrder, session: Transaction) -> Placed:
    """Take an order."""
    order = Order(**new.model_dump(), paid=False)
    session.add(order)
    await session.flush()  # The database gives it its id.
    await outbox.aemit(session, "Order", order.id, "order.placed", new)
    return Placed.model_validate(order, from_attributes=True)


@app.post("/orders/{order_id}/pay")
async def pay(order_id: OrderId, session: Transaction) -> Placed:
    """Pay an order; a second time changes nothing."""
    # Locked: of two who pay at once, the second waits and finds it paid.
    order = await session.get(Order, order_id, with_for_update=True)
    if order is None:
        raise HTTPException(404, f"there is no order {order_id}")
    if not order.paid:
        order.paid = True
        paid = {"item": order.item, "quantity": order.quantity}
        await outbox.aemit(session, "Order", order.id, "order.paid", paid)
    return Placed.model_validate(order, from_attributes=True)


@app.get("/orders")
async def orders(session: Transaction) -> list[Line]:
    """The latest orders, with their events and shipments."""
    return await lines(session, outbox.tables)


@app.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page(request: Request, session: Transaction) -> HTMLResponse:
    """The same, to look at."""
    shown = {"lines": await lines(session, outbox.tables), "trouble": await trouble(session, outbox.tables)}
    return templates.TemplateResponse(request, "page.html", shown)
