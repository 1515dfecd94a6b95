"""The studies of benchmarks/study.py: their settings, data, jobs, records, tests and tables."""
