"""Moves: planned transfers of a model's tensors from one layout to another.

`plan` intersects the layouts, chooses senders and orders the transfers. `execute` moves the bytes
between ranks and compares both sides afterwards.
"""
