"""Learner and engines in several processes, GPUs or machines: actors of Ray behind the same protocols
(docs/cluster.md).

    placement.py   settings and the cluster's machines → which actor gets which devices; how weights travel
    start.py       joins a running cluster or starts one for the run
    actors.py      starts and kills actors, waits for their results, translates Ray's errors
    engines.py     RayEngine: routes requests, replaces dead engines; RolloutActor, one engine
    learner.py     RemoteLearner: all ranks behind the protocol of one; LearnerActor, one rank; restarts

Weights travel by the transports of `covey.weights`.
"""
