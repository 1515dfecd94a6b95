"""The mathematics. One algorithm, one file; `catalogue.py` is the list of them."""

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.assemble import find_entry, find_losses, make, schema, settings
from covey.algorithms.catalogue import ALGORITHMS, LOSSES

__all__ = ["ALGORITHMS", "LOSSES", "Algorithm", "find_entry", "find_losses", "make", "schema", "settings"]
