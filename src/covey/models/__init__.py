"""Models: locating them, checking their files, loading them."""
