"""Send Celery tasks over the broker of ``celery.current_app``; see docs/how-to/celery.md.

The task's id is the delivery's id, so a repeated delivery has the same one. RabbitMQ confirms every message;
with Redis, its persistence settings decide whether an accepted message survives.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from celery import current_app
from kombu.exceptions import EncodeError, OperationalError
from kombu.utils.json import loads as loads_marked

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.sinks.handler import HandlerSink
from relaybox.sinks.sink import RELEASED, Answer, describe
from relaybox.wire.envelope import BYTES, packer
from relaybox.wire.tracing import NAMES

log = logging.getLogger("relaybox.celery")

NO_APP = (
    "there is no Celery application here: import the module that makes it where the relay starts, "
    "such as in the project's __init__.py, or in what --app names"
)


class Message(NamedTuple):
    """The call of a task."""

    id: str
    task: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]


class CelerySink(HandlerSink):
    """Publishes to Celery's broker, in threads because kombu blocks."""

    def __init__(self, destination: Destination) -> None:
        self.publisher = Publisher(destination)
        super().__init__(destination, self.publisher.publish, self.publisher.read)

    async def check(self) -> None:
        """Connect to the broker; raise ``Unavailable`` with the reason."""
        # In a thread that a cancelled caller can abandon: kombu has no time limit here and may wait forever.
        await self._threads.call(self.publisher.check)

    async def close(self) -> None:
        """Stop the threads and close the connections."""
        await super().close()
        self.publisher.close()

    def _limit_of(self, timeout: float) -> float:
        # Publishing again is safe, because the message keeps its id: there is no reason to wait longer.
        return timeout

    def _stopped(self) -> Answer:
        # For the same reason it is due at once. Stops during an outage of the broker must not count.
        return RELEASED

    def _still_running(self, seconds: float) -> Exception:
        return Unavailable(f"the broker took longer than {seconds:g}s")


class Publisher:
    """Makes and publishes messages over its own connections, each used by one thread at a time."""

    def __init__(self, destination: Destination) -> None:
        # Read it here, because other threads may have another current app.
        self._app = current_app._get_current_object()
        self._task = destination.url.partition(":")[2]
        self._pack = packer(destination.format if self._task else "payload")
        # Task arguments use Celery's markers for times, decimals and UUIDs; events do not.
        self._load: Callable[[str], Any] = json.loads if self._task else loads_marked
        self._idle: deque[Any] = deque()
        self._importing = threading.Lock()
        self._imported = False

    @property
    def eager(self) -> bool:
        """True if tasks run where they are called."""
        return bool(self._app.conf.task_always_eager)

    def read(self, delivery: Delivery) -> Message:
        """Return the message of a delivery; raise ``Reject`` if it does not describe a task."""
        packed = self._pack(delivery)
        if packed.content_type == BYTES:
            raise Reject("bytes are no argument of a Celery task; set format = 'json'")
        try:
            body = self._load(packed.body.decode())
        except (ValueError, TypeError, RecursionError) as error:
            raise Reject(f"the payload is not what Celery reads: {describe(error)}") from error
        message = self._call(str(delivery.id), body)
        context = {name: packed.headers[name] for name in NAMES if name in packed.headers}
        if not context:
            return message
        headers = {**context, **(message.options.get("headers") or {})}
        return message._replace(options={**message.options, "headers": headers})

    def _call(self, id_: str, body: Any) -> Message:
        if self._task:
            return Message(id_, self._task, [body], {}, {})
        match body:
            case {"task": str(task), "args": list(args), "kwargs": dict(kwargs), "options": dict(options)}:
                return Message(id_, task, args, kwargs, options)
        raise Reject(
            "the payload names no Celery task; emit such events with delay_via_outbox(), "
            "or name the task in the destination: sink = 'celery:package.tasks.task'"
        )

    def publish(self, message: Message) -> None:
        """Hand the message to the broker; raise ``Unavailable`` if the broker cannot be reached."""
        try:
            if self.eager:
                self._send(message)
            else:
                self._send_on_own(message)
        except EncodeError as error:
            raise Reject(describe(error)) from error

    def check(self) -> None:
        """Connect to the broker, unless tasks are eager."""
        if not self.eager:
            self._idle.append(self._connect())

    def close(self) -> None:
        """Close the connections, without waiting for a broker that may not answer."""
        if self._idle:
            threading.Thread(target=self._end_all, name="relaybox-celery", daemon=True).start()

    def _end_all(self) -> None:
        while self._idle:
            _end(self._idle.pop())

    def _send_on_own(self, message: Message) -> None:
        while True:
            try:
                producer, fresh = self._idle.pop(), False
            except IndexError:
                producer, fresh = self._connect(), True
            try:
                self._send(message, producer)
            except OperationalError as error:
                _end(producer)
                # The broker may have closed an idle connection long ago: try the next one.
                if fresh:
                    raise Unavailable(describe(error)) from error
            except BaseException:
                _end(producer)
                raise
            else:
                self._idle.append(producer)
                return

    def _send(self, message: Message, producer: Any = None) -> None:
        name, options = message.task, message.options
        task = self._registered(name)
        if task is None:
            if self.eager:
                raise Reject(f"tasks are eager, and no task is called {name!r} here; import its module")
            options = {**options, "retry": False, "producer": producer}
            self._app.send_task(name, message.args, message.kwargs, task_id=message.id, **options)
            return
        # A task that fails does not fail its delivery, just as in a worker.
        options = {**options, **({"throw": False} if self.eager else {"retry": False, "producer": producer})}
        task.apply_async(message.args, message.kwargs, task_id=message.id, add_to_parent=False, **options)

    def _registered(self, name: str) -> Any:
        """Return the registered task: unlike its name alone, it knows its queue and serializer."""
        task = self._app.tasks.get(name)
        if task is not None or self._imported:
            return task
        with self._importing:
            if not self._imported:
                # As a worker does. A task of another project stays known by name only.
                try:
                    self._app.loader.import_default_modules()
                except Exception as error:
                    log.warning("not all modules of tasks can be imported: %s", describe(error))
                self._imported = True
        return self._app.tasks.get(name)

    def _connect(self) -> Any:
        if self._app.main == "default" and not self._app.conf.broker_url:
            raise Unreachable(NO_APP)
        connection = self._app.connection_for_write()
        try:
            if connection.transport.driver_type == "amqp":
                connection.transport_options.setdefault("confirm_publish", True)
            connection.ensure_connection(
                max_retries=1 + len(connection.alt), interval_start=0, interval_step=0
            )
            return self._app.amqp.Producer(connection.channel(), auto_declare=False)
        except Exception as error:
            connection.collect()
            raise Unreachable(describe(error)) from error


def _end(producer: Any) -> None:
    with suppress(Exception):
        producer.connection.release()
