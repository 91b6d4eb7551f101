"""What every answer says to browsers about itself."""

from __future__ import annotations

from starlette.types import Message, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

SECURITY = {
    "content-security-policy": CSP,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def securing(send: Send) -> Send:
    """Sends the same, with these headers, and kept by no cache unless the answer says otherwise."""

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            present = {name.lower() for name, _ in given}
            added = {**SECURITY, "cache-control": "no-store"}
            given += [
                (name.encode(), value.encode())
                for name, value in added.items()
                if name.encode() not in present
            ]
            message = {**message, "headers": given}
        await send(message)

    return secured
