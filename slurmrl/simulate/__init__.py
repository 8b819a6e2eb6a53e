"""Simulation of a whole trial on a simulated clock: jobs, waits, failures, steps and commits.

The simulation runs the code of real trials for the ledger, the leases, the chain of jobs and the
decision to give up after failures. docs/simulate.md lists the differences.
"""
