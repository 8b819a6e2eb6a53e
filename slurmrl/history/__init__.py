"""The one truth about a trial: a sequence of records, each won by an exclusive create.

`record` is one entry, `log` reads and appends, `writer` is how incarnations and commands append
without harming each other, `state` is what the records mean.
"""
