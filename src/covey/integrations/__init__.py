"""Covey's algorithms inside other trainers. Covey does not import this package, and importing it does not need them."""
