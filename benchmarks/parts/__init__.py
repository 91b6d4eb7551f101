"""The parts of the benchmarks, one per file."""
