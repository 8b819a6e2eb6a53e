"""Rewards by a rule, shared by algorithms."""
