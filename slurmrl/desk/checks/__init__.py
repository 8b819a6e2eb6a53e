"""Checks before a trial is queued: files, reward, disk space.

``submit``, ``resume``, ``--dry-run`` and ``doctor`` call ``check`` in `run`. Checks that read large
files or run the user's code do so in a child process (`child`), within a time limit.
"""
