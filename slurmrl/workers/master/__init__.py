"""The master: one per trial, on the first host, without a GPU and without torch. It walks the
dataflow graph step by step, keeps the scalars that change, and alone writes the history.
"""
