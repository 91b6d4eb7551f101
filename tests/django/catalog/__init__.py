"""A catalog whose changes are events. It has no migrations: its tables exist in test databases alone."""
