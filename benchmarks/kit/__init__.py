"""What the benchmarks share: shapes and floors, random models, child processes, Covey, its rivals, tables."""
