"""Connections of our own, and the steps that are driven on them."""
