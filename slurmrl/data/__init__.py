"""Batches, datasets, orders and packing.

``meta``, ``order``, ``packing`` and ``records`` are torch-free (the master uses them); ``sample``,
``dataset`` and the dataset types hold tensors. A new dataset type = one file beside ``prompt.py``
plus one line in the table of ``dataset.py``.
"""
