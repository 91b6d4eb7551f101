"""What the benchmarks measure, one part a file."""
