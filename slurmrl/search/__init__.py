"""Search for the layouts and settings with which a step of a configuration is fastest.

`candidates` lists the possible layouts of each model, `best_layouts` combines them. The plan
predicts seconds and memory.
"""
