"""``relaybox secret new``."""

from __future__ import annotations

from base64 import b64encode
from secrets import token_bytes

import typer


def new() -> None:
    """Print a new secret that signs webhooks: 32 random bytes, as whsec_ and base64."""
    typer.echo(f"whsec_{b64encode(token_bytes(32)).decode()}")
