"""Moves: planned transfers of a model's tensors from one layout to another.

`regions` intersects the layouts, `plan` chooses senders and orders the transfers, `execute` moves
the bytes between ranks, and `verify` compares both sides afterwards.
"""
