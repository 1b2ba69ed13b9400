"""GATE: the effect of treating everybody, from a ramp-up under network interference."""
