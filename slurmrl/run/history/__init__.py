"""The history of a trial: a sequence of exclusively created records that define its state.

`slots` defines, reads and appends records. `state` computes the state of the trial from the
records, and lets incarnations and commands append safely.
"""
