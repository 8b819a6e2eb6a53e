"""Search for the layouts and settings that make a step of a configuration fastest.

`candidates` lists the possible layouts of each model, and `best_layouts` combines them. The
estimates of `plan` predict the seconds of a step and the memory.
"""
