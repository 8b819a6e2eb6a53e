"""What a run says about itself: metrics, events, and the status put together from all traces.

A new place to send metrics to is one class with ``Sink``'s methods and one branch in
``sinks.make_sinks``.
"""
