"""Settings: their definitions (`schema`), foreign names (`aliases`), and the configuration of a run (`compose`)."""

from covey.config.compose import Composed, compose, fingerprint, recipe_names
from covey.config.read import expand_sweep, literal, read_yaml
from covey.config.schema import Config
from covey.config.settings import Setting, all_keys
from covey.config.validate import WrongValues

__all__ = ["Composed", "Config", "Setting", "WrongValues", "all_keys", "compose", "expand_sweep", "fingerprint"]
__all__ += ["literal", "read_yaml", "recipe_names"]
