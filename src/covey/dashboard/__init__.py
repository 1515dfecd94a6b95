"""A live dashboard over run folders: curves, comparisons, episodes, diagnostics. Local and offline (docs/dash.md)."""
