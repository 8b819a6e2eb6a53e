"""Bundles: one archive with a configuration and every file that it names, for a cluster without a
network.

A bundle is a plain tar of regular files: the configuration with paths inside of the bundle, the
user's own code beside it, the files of models and datasets below `INPUTS`, wheels below `WHEELS`,
and as the last member `MANIFEST`, with the size and checksum of every other one. The same inputs
make the same bytes.
"""

from slurmrl.desk.bundle.manifest import INPUTS, MANIFEST, WHEELS

__all__ = ["INPUTS", "MANIFEST", "WHEELS"]
