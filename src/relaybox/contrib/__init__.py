"""Relaybox inside other tools, one module each."""
