"""The engine: scheduler and runner in one loop, in this process (`core`) or in one of its own (`process`)."""
