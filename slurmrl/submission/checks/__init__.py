"""What is looked at before a trial is queued: its files, its reward, its disk.

``check`` in `run` is what ``submit``, ``resume``, ``--dry-run`` and ``doctor`` call. Whatever reads
large files or runs the user's code does so in a child process (`child`), within a time limit.
"""
