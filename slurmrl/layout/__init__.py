"""Where the elements of a model's tensors lie: boxes, shards, layouts, and the plan of copies
between two layouts.

Hugging Face files, checkpoints of any world size and engines are all layouts, so loading, saving,
exporting and reallocating are one operation: plan the copies, then execute them. Free of torch.
"""
