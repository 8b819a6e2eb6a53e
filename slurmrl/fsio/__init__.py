"""Robust file operations on a shared directory: exclusive create, replace, tolerant reads.

`calls` is the seam to the operating system; other packages use `atomic`.
"""
