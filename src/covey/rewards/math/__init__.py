"""Rewards for mathematical answers: one spelling, exact comparison, math-verify."""
