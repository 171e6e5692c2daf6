"""The routes: each reads a body, asks the pipeline, and encodes what comes."""
