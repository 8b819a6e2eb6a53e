"""The history of a trial, its source of truth: a sequence of exclusively created records.

`slots` defines, reads and appends records; `state` folds them into the state of the trial and lets
incarnations and commands append safely.
"""
