"""How good a model is: answers to held-out tasks, figures with their uncertainty, models side by side."""
