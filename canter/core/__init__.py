"""The vocabulary of the engine: values that every layer may know. Imports nothing of Canter and never torch."""
