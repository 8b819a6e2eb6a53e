"""Search for the layouts and settings with which a step of a configuration is fastest.

`candidates` lists the possible layouts of each model, and `best_layouts` combines them. The
estimates of `plan` predict the seconds of a step and the memory.
"""
