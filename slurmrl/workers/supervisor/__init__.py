"""The supervisor: the batch process of one job. It starts the agents, one per host, passes
warnings on to them, starts them again where the allocation is still good, and leaves when nothing
is left to do here.

    round 0: agents ─── one of them, or its host, dies ──► round 1: agents ─── … ──► the link ends
"""
