"""One client of aiobotocore for all requests of a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from relaybox.core.outcome import Retry
from relaybox.sinks.sink import being_cancelled
from relaybox.sinks.sqs.answer import bad_credentials
from relaybox.sinks.sqs.place import Place

T = TypeVar("T")


class Client:
    """Makes the client when it is needed, and another where its credentials are no good.

    A client keeps what it found, and never looks again whether there are others.
    """

    def __init__(self, place: Place, *, connections: int, timeout: float) -> None:
        self._place = place
        self._config = AioConfig(
            # Whether and when to try again, the relay decides.
            retries={"total_max_attempts": 1},
            connect_timeout=timeout,
            read_timeout=timeout,
            max_pool_connections=connections,
        )
        self._making = asyncio.Lock()
        self._current: _Opened | None = None

    async def ask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """What the work, one request, makes of the client."""
        async with self._making:
            if self._current is None:
                self._current = await self._open()
            opened = self._current
        task = asyncio.ensure_future(work(opened.client))
        opened.under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Retry("the sink was closed before the answer came") from None
        except Exception as error:
            if bad_credentials(error) and opened is self._current:
                self._current = None
            raise
        finally:
            opened.under_way.discard(task)
            if opened is not self._current and not opened.under_way:
                await opened.stack.aclose()

    async def close(self) -> None:
        """Give up the connections, also those in use or just being made."""
        async with self._making:
            opened, self._current = self._current, None
        if opened is None:
            return
        # A request that has not come to its connection yet would make one anew.
        for task in opened.under_way:
            task.cancel()
        await asyncio.gather(*opened.under_way, return_exceptions=True)
        await opened.stack.aclose()

    async def _open(self) -> _Opened:
        place = self._place
        stack = AsyncExitStack()
        making = AioSession(profile=place.profile).create_client(
            place.service,
            region_name=place.region,
            endpoint_url=place.endpoint,
            aws_access_key_id=place.address.user,
            aws_secret_access_key=place.address.password,
            config=self._config,
        )
        return _Opened(await stack.enter_async_context(making), stack)


class _Opened:
    def __init__(self, client: Any, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack
        self.under_way: set[asyncio.Task[Any]] = set()
