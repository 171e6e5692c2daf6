"""Files of requests: reading them, answering each line, and the results."""
