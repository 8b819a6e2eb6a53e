"""A worker: one rank. It hosts model shards and the rank's part of the batch, and executes the
master's messages in the order in which they come. The only process that imports torch.
"""
