"""Rollout: from tasks to scored groups.

collector.py      runs an agent on every attempt, scores the episodes; the groups of each step
asynchronous.py   the same in the background while the learner learns, with bounded staleness (docs/async.md)
policy.py         one episode's view of the engine
rendering.py      messages → token ids, turn by turn, without tokenising sampled tokens again
templates/        chat templates by name
embedded/         the engine in this process, with the learner's weights
vllm/             the engine in a vLLM process (docs/rollout.md)
"""
