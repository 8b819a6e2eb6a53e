"""Checks whether this cluster can run trials, from the login node and from inside a short job.

One file per kind of check. A check measures something and gives advice. To add
one, write a function that returns a `Check` and name it in `login` or `host`.
"""
