"""What is used of libraries that is not in their documentation is still there."""

from __future__ import annotations

import inspect

import aiohttp
import aiormq
import nats.aio.client
import nats.aio.transport
import pytest
import redis.asyncio
import sqlalchemy as sa
from aiohttp.client_proto import ResponseHandler

from relaybox.search.select_rows import REFUSED_CLAUSES
from relaybox.sinks.http.limits import LimitedHandler, limit_answers
from relaybox.sinks.rabbitmq.connection import Connection


def what_to_do(library: str, name: str, module: str) -> str:
    return (
        f"{library} {name} is gone or has changed. Look up in the library what took its place, change the"
        f" functions that use it in src/relaybox/{module} and the version in the comment beside them, and run"
        " the integration tests of that module. Until then, cap the version in pyproject.toml."
    )


@pytest.mark.parametrize("name", ["_reader", "_writer"])
def test_a_connection_of_redis_shows_its_streams(name: str) -> None:
    connection = redis.asyncio.Connection()
    message = what_to_do("redis-py: Connection.", name, "sinks/redis.py")
    assert getattr(connection, name, ...) is None, message


@pytest.mark.parametrize(
    ("name", "empty"), [("_pending", []), ("_pending_data_size", 0), ("_transport", None)]
)
def test_a_client_of_nats_shows_what_it_has_not_sent(name: str, empty: object) -> None:
    client = nats.aio.client.Client()
    message = what_to_do("nats-py: Client.", name, "sinks/nats/connection.py")
    assert getattr(client, name, ...) == empty, message


def test_a_transport_of_nats_shows_its_stream() -> None:
    transport = nats.aio.transport.TcpTransport()
    message = what_to_do("nats-py: TcpTransport.", "_io_writer", "sinks/nats/connection.py")
    assert getattr(transport, "_io_writer", ...) is None, message


def test_a_channel_of_aiormq_shows_why_it_closes() -> None:
    message = what_to_do("aiormq: Channel.", "_close_exception", "sinks/rabbitmq/connection.py")
    assert "_close_exception" in aiormq.Channel.__init__.__code__.co_names, message


@pytest.mark.parametrize("event", ["blocked", "unblocked"])
def test_a_connection_of_aiormq_hears_of_the_block_where_we_do(event: str) -> None:
    name = f"_Connection__handle_connection_{event}"
    message = what_to_do("aiormq: Connection.", name, "sinks/rabbitmq/connection.py")
    theirs = aiormq.Connection.__dict__.get(name)
    assert inspect.iscoroutinefunction(theirs), message
    assert getattr(Connection, name) is not theirs, message


@pytest.mark.parametrize(
    ("owner", "name", "given"),
    [
        (aiohttp.ClientRequest, "__init__", ["method", "url", "loop"]),
        (aiohttp.TCPConnector, "connect", ["req", "traces", "timeout"]),
        (ResponseHandler, "set_response_params", ["read_until_eof", "auto_decompress"]),
        (ResponseHandler, "read", []),
        (ResponseHandler, "feed_data", ["data", "size"]),
        (ResponseHandler, "data_received", ["data"]),
    ],
)
def test_what_is_below_a_session_of_aiohttp_is_called_as_before(
    owner: type, name: str, given: list[str]
) -> None:
    message = what_to_do(f"aiohttp: {owner.__name__}.", name, "sinks/http/exchange.py")
    found = getattr(owner, name, None)
    assert callable(found), message
    assert {*given} <= {*inspect.signature(found).parameters}, message
    assert hasattr(ResponseHandler, "should_close"), message


async def test_a_connector_of_aiohttp_makes_our_handlers() -> None:
    message = what_to_do("aiohttp: BaseConnector.", "_factory", "sinks/http/limits.py")
    connector = aiohttp.TCPConnector()
    assert isinstance(connector._factory(), ResponseHandler), message
    limit_answers(connector, size=1000)
    handler = connector._factory()
    assert isinstance(handler, LimitedHandler)
    assert (handler._exception, handler._payload) == (None, None), message
    await connector.close()


@pytest.mark.parametrize("name", [*REFUSED_CLAUSES, "_with_options"])
def test_a_select_of_sqlalchemy_shows_its_clauses(name: str) -> None:
    message = what_to_do("SQLAlchemy: Select.", name, "search/select_rows.py")
    assert hasattr(sa.select(sa.literal(1)), name), message
