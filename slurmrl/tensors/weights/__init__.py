"""Weight versions: the actor's weights after a training step, in files that rollout hosts read.

Trainer ranks write parts (`writer`), of which a manifest makes a version (`format`). A host keeps
one version and updates it (`local_copy`). `inventory` lists the versions of a trial and removes old
ones. docs/protocols.md describes the files.
"""
