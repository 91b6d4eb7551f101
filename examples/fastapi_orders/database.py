"""The tables: the shop has its orders, the warehouse its shipments."""

import os

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE = os.environ["DATABASE_URL"]

engine = create_async_engine(DATABASE.replace("postgresql://", "postgresql+asyncpg://"))
Sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """What SQLAlchemy knows of the tables."""


class Order(Base):
    """What somebody wants."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=False)


class Shipment(Base):
    """What left the warehouse. Nothing here forbids a second one for an order; the inbox does."""

    __tablename__ = "shipment"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)


async def create_tables() -> None:
    """Make those that are missing; a project would have migrations."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
