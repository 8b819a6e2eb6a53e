"""The agent: one per host of a job. It starts and watches the workers of its host, carries
messages between them and the shared directory, and beats the host's lease. It never imports torch.
"""
