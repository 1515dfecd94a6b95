"""How new weights travel from the learner to an engine that has its own copy of the model."""
