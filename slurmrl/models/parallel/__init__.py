"""One model on several ranks.

Matrices and vocabulary are split over tensor ranks, and tokens over context ranks. Sequence
parallelism splits the tokens between the blocks over tensor ranks, too.

Modules work on local tensors and call the collectives that they need. The decoder passes each
module a ``Split``, which describes the rank's part.
"""
