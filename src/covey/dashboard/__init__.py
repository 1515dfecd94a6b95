"""A page over run folders: is it learning, is it cheating, which run is better. Local, offline, live (docs/dash.md)."""
