"""Checkpoints for the engines: fetched, converted or made on the spot."""
