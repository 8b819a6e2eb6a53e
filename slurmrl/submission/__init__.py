"""What the command line does to trials: find them, make them, submit and end them.

Everything here can be called without a terminal; nothing here imports torch.
"""
