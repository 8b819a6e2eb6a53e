"""One model on several ranks: matrices and vocabulary split over tensor ranks, tokens over context
ranks and, between the blocks, over tensor ranks too (sequence parallelism).

All of it works on local tensors; the collectives stand where a module needs them. What a rank has
to know is one ``Split``, which the decoder hands to its modules.
"""
