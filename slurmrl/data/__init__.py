"""Batches, datasets, orders and packing.

Only ``sample`` and ``dataset`` hold tensors; the others are torch-free. A file's rows are read
and checked by ``records`` from ``sources`` (the formats), tokenized by ``rows`` as their type says
(``types``), stored by ``preparation`` and ``prepared``, and become samples in ``dataset``.
"""
