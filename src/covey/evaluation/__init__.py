"""Evaluation of models on held-out tasks: metrics with confidence intervals, and paired comparisons."""
