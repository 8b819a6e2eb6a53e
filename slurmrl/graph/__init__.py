"""The dataflow graph: which calls an algorithm makes on which models, and what they pass on."""
