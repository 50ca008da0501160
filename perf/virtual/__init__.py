"""The product in virtual time: what a run is given, the run, what comes of it."""
