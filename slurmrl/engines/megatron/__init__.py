"""megatron-core's models, schedules and distributed optimizer behind the contract of engines, for
tensor, sequence, pipeline, context and expert parallelism.

``schema``, ``place`` and ``parts`` are torch-free.
"""
