"""Batches, datasets, orders and packing.

``meta``, ``order``, ``packing`` and ``records`` are torch-free (the master uses them); ``sample``
and ``dataset`` hold tensors. To add a dataset type, add a class to ``dataset.py`` and a line to its
table.
"""
