"""The history of a trial, its source of truth: a sequence of exclusively created records.

`record` defines one entry, `log` reads and appends, `writer` lets incarnations and commands append
safely, `state` folds the records into the state of the trial.
"""
