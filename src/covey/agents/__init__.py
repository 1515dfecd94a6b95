"""Agents play episodes, from a task to its final answer. They work with messages and token ids, not tensors."""
