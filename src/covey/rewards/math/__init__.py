"""Rewards for mathematical answers: normalization, exact comparison, math-verify."""
