"""Wires a run: checks the settings, loads the model, builds its parts. Used by the command line and by Python."""
