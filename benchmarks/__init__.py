"""What Relaybox costs, measured: ``python -m benchmarks.store``, ``.emit`` and ``.drivers``."""
