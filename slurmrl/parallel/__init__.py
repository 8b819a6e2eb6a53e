"""How ranks, axes and devices relate. ``topology`` and ``gpu`` are torch-free; process groups and
devices of torch are in ``groups`` and ``device``."""
