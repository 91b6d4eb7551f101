"""Relaybox's own connections, on which steps are driven."""
