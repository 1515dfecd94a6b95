"""Generation settings of a loaded model, which are saved as they were loaded."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig


class LoadedGeneration(GenerationConfig):
    """transformers loads settings that it refuses to save, such as a temperature without do_sample. Sampling does not
    use them, so they must not prevent a checkpoint."""

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Accepts all settings."""


def keep_generation(model: Any) -> None:
    if (loaded := getattr(model, "generation_config", None)) is not None:
        model.generation_config = LoadedGeneration.from_dict(loaded.to_dict())
