"""Observing a run: metrics, events, and the status derived from everything a run writes.

A new metrics sink is one class with ``Sink``'s methods and one branch in
``sinks.make_sinks``.
"""
