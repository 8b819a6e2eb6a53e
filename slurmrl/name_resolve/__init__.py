"""The name store, by which the processes of a trial find each other.

It is a folder of the shared directory (`file`). `base` has the contract, which tests also show for
a store in memory.
"""
