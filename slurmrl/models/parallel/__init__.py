"""One model on several ranks.

Matrices and vocabulary are split over tensor ranks, and tokens over context ranks. With sequence
parallelism, tensor ranks also split the tokens between the blocks.

Modules work on local tensors and call the collectives that they need. The decoder passes each
module a ``Split``, which describes the rank's part.
"""
