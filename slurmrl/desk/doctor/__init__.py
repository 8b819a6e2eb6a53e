"""Checks whether this cluster can run trials, from the login node and from inside a short job.

A check measures something and gives advice. To add one, write a function that returns a `Check` and
name it in `examine` (the login node) or in `probe.check_host` (a host of the job).
"""
