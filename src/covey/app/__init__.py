"""The application layer: checks settings, builds runs and trains them. Used by the command line and the Python API."""
