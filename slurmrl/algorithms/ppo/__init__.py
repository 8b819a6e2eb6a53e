"""Proximal policy optimisation with a critic and a reference model."""
