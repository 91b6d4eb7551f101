"""Integrations with other tools, one module for each."""
