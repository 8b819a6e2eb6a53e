"""Batches, datasets, orders and packing.

Only ``sample`` and ``dataset`` hold tensors; the others are torch-free. ``sources`` has the formats
of files, and ``records`` reads and checks their rows. ``rows`` tokenizes them by their type
(``types``), ``preparation`` and ``prepared`` store them, ``dataset`` makes samples of them.
"""
