"""The megatron engine: megatron-core's models, schedules and distributed optimizer.

It supports tensor, sequence, pipeline, context and expert parallelism.

``schema``, ``place`` and ``parts`` are torch-free.
"""
