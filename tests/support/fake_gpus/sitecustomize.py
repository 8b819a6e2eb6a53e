"""Imported by every Python that has this folder on PYTHONPATH: the GPUs of a Slurm test bed are
files, so workers that get one compute on the CPU, and a torch for CPUs is accepted for them.
"""

import sys

if "slurmrl.workers.worker" in sys.orig_argv:
    from slurmrl.tensors.parallel import device

    device.choose = lambda gpus: device.CPU
elif sys.orig_argv[1:3] == ["-m", "slurmrl"]:
    from slurmrl.desk import trial_checks

    trial_checks.torch_build = lambda: None
