"""Message channels between processes: JSON objects in checksummed frames.

`log` carries them over the shared directory, `pipe` between a process and its child.
"""
