"""The servers of the project's tests, for the benchmarks' own tests: ``pytest benchmarks/tests``."""

from tests.conftest import clean_logging, fresh_database, postgres18_url, pytest_configure

__all__ = ["clean_logging", "fresh_database", "postgres18_url", "pytest_configure"]
