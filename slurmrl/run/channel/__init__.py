"""Message channels between processes: JSON objects in checksummed frames.

`message_log` carries messages over the shared directory, `pipe` between a process and its child.
"""
