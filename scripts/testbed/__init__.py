"""Optional parts of the Slurm test bed."""
