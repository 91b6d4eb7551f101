"""Real servers for the tests, the benchmarks and the demonstration, one module each.

Each module has a context manager ``server()`` that yields a URL. A server lives in a temporary directory on a
free port, and dies with the process that started it.
"""
