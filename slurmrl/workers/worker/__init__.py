"""The worker: one process per rank.

A worker has model shards and the rank's part of the batch, and executes the master's messages in
order. Only workers and their fork server import torch.
"""
