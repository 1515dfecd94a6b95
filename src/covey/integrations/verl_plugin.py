"""The entry point `verl.plugins`. verl only imports this module, so the import registers the algorithms."""

from covey.integrations.verl import register

register()
