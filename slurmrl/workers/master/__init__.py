"""The master: one process per incarnation, on the first host, without GPU and torch.

The master executes the dataflow graph step by step and keeps the changing scalars. No other process
of an incarnation writes the history.
"""
