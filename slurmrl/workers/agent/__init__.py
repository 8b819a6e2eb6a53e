"""The agent: one per host of a job.

The agent starts and watches the workers of its host, relays messages between them and the shared
directory, and renews the host's lease. It does not import torch.
"""
