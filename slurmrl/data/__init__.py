"""Datasets and batches: formats of files, checks and tokens of rows, the order of items.

Only ``sample`` and ``dataset`` import torch. ``sources`` reads files, and ``records`` checks their
rows. ``rows`` tokenizes the rows by their type (``types``). ``preparation`` and ``prepared`` store
the tokens, and ``dataset`` makes samples of them.
"""
