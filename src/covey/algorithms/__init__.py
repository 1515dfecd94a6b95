"""The algorithms, one per file; `catalogue.py` lists them."""

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.assemble import algorithm_schemas, find_entry, find_losses, make, schema, settings
from covey.algorithms.catalogue import ALGORITHMS, LOSSES

__all__ = ["ALGORITHMS", "LOSSES", "Algorithm", "algorithm_schemas", "find_entry", "find_losses", "make", "schema"]
__all__ += ["settings"]
