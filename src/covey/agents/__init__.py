"""Agents: what happens between a task and its last answer. They think in messages and token ids, not in tensors."""
