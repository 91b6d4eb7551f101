"""The table of the documents."""

import os
from datetime import UTC, datetime
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE = os.environ["DATABASE_URL"]

engine = create_async_engine(DATABASE.replace("postgresql://", "postgresql+asyncpg://"))
Sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """What SQLAlchemy knows of the tables."""


def now() -> datetime:
    """The time of a change."""
    return datetime.now(UTC)


class Document(Base):
    """What people write and look for. ``version`` counts its changes, so that editors notice each other."""

    __tablename__ = "document"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    title: Mapped[str]
    body: Mapped[str]
    version: Mapped[int] = mapped_column(default=1)
    updated_at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True), default=now, index=True)


async def create_tables() -> None:
    """Make those that are missing; a project would have migrations."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
