"""The master: one process per incarnation, on the first host, without GPU and torch.

It walks the dataflow graph step by step, keeps the changing scalars, and is the only process of an
incarnation that writes the history.
"""
