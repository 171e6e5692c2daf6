"""One file for each family of output formats."""
