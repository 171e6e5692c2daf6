"""Model files: from a name to files, configuration and tensors. Knows nothing of torch."""
