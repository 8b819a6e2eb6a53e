"""Operations on trials: find, make, submit and cancel them.

Everything works without a terminal, and nothing imports torch.
"""
