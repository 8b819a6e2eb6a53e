"""Batches, datasets, orders and packing.

Only ``sample`` and ``dataset`` hold tensors; the others are torch-free. A file's rows are read by
``records``, checked by ``row_checks``, tokenised by ``rows``, stored by ``preparation`` and
``prepared``, and become samples in ``dataset``. To add a dataset type, add a class to
``dataset.py`` and a line to its table.
"""
