"""The supervisor: the batch process of one job.

It starts the agents, one per host, forwards warnings to them, restarts them while the allocation is
usable, and exits when nothing is left to do.

    round 0: agents ─── one of them, or its host, dies ──► round 1: agents ─── … ──► the link ends
"""
