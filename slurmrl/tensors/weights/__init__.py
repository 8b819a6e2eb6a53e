"""Weight versions: the actor's weights after a training step, in files that rollout hosts read.

Trainer ranks write parts (`writer`), and a manifest makes them a version (`format`). A host keeps
one version and updates it (`local_copy`). `inventory` lists the versions of a trial and removes old
versions. docs/protocols.md describes the files.
"""
