"""Models: where they are, what their files may contain, loading them."""
