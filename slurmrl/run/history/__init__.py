"""The history of a trial, its source of truth: a sequence of exclusively created records.

`slots` defines, reads and appends records. `state` computes the state of the trial from them, and
lets incarnations and commands append safely.
"""
