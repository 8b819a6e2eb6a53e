"""File operations that hold on a shared directory: exclusive create, replace, tolerant reads.

`calls` is the seam to the operating system, `atomic` what everybody uses.
"""
