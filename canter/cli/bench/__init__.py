"""`canter bench`: a module for each benchmark. Every speed stands beside the machine's limit, measured in the same run."""
