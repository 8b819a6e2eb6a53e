"""The run directory and the protocols in it. Torch-free.

Paths, keys, the history, leases and control logs, and the files in which processes report failures,
events, metrics and samples.
"""
