"""Who owns which cache block: pools, the prefix index, one manager for each kind of state, and their coordinator."""
