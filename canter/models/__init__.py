"""Model architectures: one file a family, one row each in `registry`. Checkpoint names appear nowhere else."""
