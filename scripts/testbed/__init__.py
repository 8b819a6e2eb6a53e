"""Parts of the Slurm test bed that most beds do without."""
