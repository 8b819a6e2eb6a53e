"""What people see of a trial: its status, story and diagnosis, derived from what it writes.

A new sink of metrics is a file in ``sinks``.
"""
