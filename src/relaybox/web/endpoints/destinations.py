"""``/api/destinations``, ``/api/destinations/{name}`` and what can be done with one."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

from relaybox.errors import did_you_mean
from relaybox.web import documents, read, render, schemas
from relaybox.web.problems import invalid, not_found


async def destinations(request: Request) -> documents.DestinationsDocument:
    """Every destination that is configured, or has rows."""
    admin = request.state.admin
    configured = await admin.destinations()
    found = (await admin.stats()).destinations
    return documents.DestinationsDocument(
        destinations=[render.destination(one, configured.get(one.name), request.app.rules) for one in found]
    )


async def destination(request: Request) -> documents.DestinationDocument:
    """One destination: its deliveries, and what holds it up."""
    admin, name = request.state.admin, await _known(request)
    [found] = [one for one in (await admin.stats()).destinations if one.name == name]
    return render.destination(found, (await admin.destinations()).get(name), request.app.rules)


async def pause(request: Request) -> documents.PausedDocument:
    """Let nothing more be sent there, until a time or until it is resumed."""
    body: schemas.PauseBody = request.state.body
    name, until = await _known(request), read.moment(body.until, "until", 1)
    if until is not None and until <= datetime.now(UTC):
        raise invalid("until", "this time is over; write one to come, or a duration such as 30m")
    await request.state.admin.pause(name, body.reason, until)
    return documents.PausedDocument(destination=name, paused=True, reason=body.reason, until=until)


async def resume(request: Request) -> documents.ResumedDocument:
    """End a pause, and close an open circuit."""
    name = await _known(request)
    return documents.ResumedDocument(destination=name, resumed=await request.state.admin.resume(name))


async def test(request: Request) -> documents.TestedDocument:
    """Write an event that shows whether deliveries arrive there."""
    name = await _known(request)
    return documents.TestedDocument(destination=name, event_id=await request.state.admin.test(name))


async def _known(request: Request) -> str:
    name = str(request.path_params["name"])
    names = await request.state.admin.names() if "\0" not in name else ()
    if name not in names:
        raise not_found(f"No destination is called {name!r}{did_you_mean(name, names)}")
    return name
