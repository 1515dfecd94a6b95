"""The same protocols across processes and machines: learner and engines as actors of Ray (docs/cluster.md).

placement.py     settings + what a cluster has → who sits where          start.py   joins a cluster or starts one
actors.py        actors on their seats; their ends and their errors     messages.py       Ray's words, shortened
engine.py        RayEngine: requests, replacements                       routing.py        which engine
rollout_actor.py one engine                                              learner_actor.py  one rank of the learner
learner.py       RemoteLearner: all ranks as one; restarts
transport.py     weights from process to process                         publish.py        who sends, who takes, when
"""
