"""What Relaybox costs, measured: ``python -m benchmarks``."""
