"""Covey's algorithms inside other trainers. Nothing of Covey imports this room, and importing it needs none of them."""
