"""Shared by the benchmarks: model shapes and lower bounds, random models, child processes, other libraries, tables."""
