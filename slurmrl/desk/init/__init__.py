"""What ``slurmrl init`` writes: a first configuration, and the profile of a site.

``templates/`` has a commented configuration for each kind of training; ``starter`` names the files
that go with it. ``survey`` asks the cluster and this host, ``questions`` makes proposals of the
answers, ``profile`` writes them down, and ``files`` writes without overwriting anything.
"""
