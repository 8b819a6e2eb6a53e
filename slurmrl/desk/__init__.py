"""Operations on trials on the login node: find, make, submit, check and cancel them.

All operations work without a terminal, and only the inspector's child process imports torch.
"""
