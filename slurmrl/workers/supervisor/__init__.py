"""The supervisor: the batch process of one job.

The supervisor starts one agent per host and forwards warning signals to the agents. It restarts
them in a new round while enough hosts are usable, and exits when no work is left.

    round 0: agents ─── an agent or its host dies ──► round 1: agents ─── … ──► the link ends
"""
