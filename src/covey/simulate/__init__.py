"""Predicts step time, utilisation, staleness and memory of a run on machines that are not rented yet."""
