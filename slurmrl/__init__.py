"""slurmrl: RL post-training of language models as plain Slurm batch jobs."""

__version__ = "0.1.0"
