"""TLS as a broker's options ask for it: ``ca``, ``certificate`` and ``key`` name files."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.sinks.broker import text

TLS_OPTIONS = {"ca": text, "certificate": text, "key": text}
"""The options, as ``parse_address`` takes them."""


def tls_context(options: Mapping[str, Any], destination: Destination) -> ssl.SSLContext:
    """Verifies the server and its name; raises ``ConfigError`` where a file cannot be read."""
    setting = f"destination {destination.name!r}"
    if "key" in options and "certificate" not in options:
        raise ConfigError(f"{setting}: key is of no use without certificate; write both")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "certificate" in options:
            context.load_cert_chain(options["certificate"], options.get("key"))
    except OSError as error:
        files = ", ".join(f"{name} = {options[name]!r}" for name in TLS_OPTIONS if name in options)
        raise ConfigError(f"{setting}: {files} cannot be read: {error}") from None
    return context
