"""The ways in which formats write the arguments of calls, each read piece by piece."""
