"""Robust file operations on a shared directory: exclusive create, replace, tolerant reads.

Only `calls` calls the operating system; other packages use `atomic`.
"""
