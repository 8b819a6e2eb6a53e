"""The agent: one per host of a job.

It starts and watches the workers of its host, relays messages between them and the shared
directory, and renews the host's lease. It never imports torch.
"""
