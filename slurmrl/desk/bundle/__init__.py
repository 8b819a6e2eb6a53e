"""Bundles: one archive with a configuration and its files, for a cluster without a network.

A bundle is a plain tar of regular files: the configuration with paths inside the bundle, the user's
own code next to it, the files of models and datasets below `INPUTS`, wheels below `WHEELS`, and as
the last member `MANIFEST`, with the size and checksum of every other one. The same inputs make the
same bytes.
"""

from slurmrl.desk.bundle.manifest import INPUTS, MANIFEST, WHEELS

__all__ = ["INPUTS", "MANIFEST", "WHEELS"]
