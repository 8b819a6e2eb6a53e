"""The worker: one rank.

It holds model shards and the rank's part of the batch, and executes the master's messages in order.
Of the processes of a run, only workers and the fork server that they are forked from import torch.
"""
