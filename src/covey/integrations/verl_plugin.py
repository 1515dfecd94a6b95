"""What verl imports: the entry point `verl.plugins`. verl loads it and calls nothing, so importing it registers."""

from covey.integrations.verl import register

register()
