"""The dataflow graph: the calls of an algorithm, their models, and the keys that they exchange."""
