"""What the benchmarks share: shapes and floors, random models, child processes, Covey's road, its rivals, tables."""
