"""One model on several ranks: matrices and vocabulary split over tensor ranks, tokens over context
ranks and, between the blocks, over tensor ranks too (sequence parallelism).

Modules work on local tensors and call the collectives that they need. The decoder passes each
module a ``Split``, which describes the rank's part.
"""
