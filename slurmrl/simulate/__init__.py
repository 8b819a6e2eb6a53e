"""Simulation of a whole trial on a simulated clock: jobs, waits, failures, steps and commits.

It decides with the ledger, leases, judgment of endings and chain rules of real trials
(docs/simulate.md lists the exceptions).
"""
