"""Consume events from brokers, one module each: acknowledged after the commit, done once."""
