"""The worker: one rank.

It has model shards and the rank's part of the batch, and executes the master's messages in order.
Only workers and their fork server import torch; the other processes of a run do not.
"""
